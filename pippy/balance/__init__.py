"""Balancing: where to cut a model so that its stages are alike in time, size or number of layers."""
