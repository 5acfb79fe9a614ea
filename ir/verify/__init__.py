"""The rules that every compiled model keeps, and the verifier that checks all of them."""
