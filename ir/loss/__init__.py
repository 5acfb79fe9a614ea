"""The passes that add a loss and a backward."""
