"""The best order for given costs, found by trying."""
