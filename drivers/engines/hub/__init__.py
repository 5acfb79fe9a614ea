"""The engine of clusters whose workers come from outside, and the side of such a worker."""
