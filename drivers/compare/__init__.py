"""What steps are compared by that must give the same numbers."""
