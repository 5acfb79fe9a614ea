"""A model becomes a marked graph."""
