"""The passes that add a loss and a backward, and the rules that every compiled model keeps."""
