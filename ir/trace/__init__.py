"""From a model to a marked graph."""
