"""What is computed: tracing, splitting, shared parameters, loss, backward, the verifier, the reference."""
