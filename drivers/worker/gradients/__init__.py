"""Gradients on a worker, from the end of a backward to the update: hooks, sums of copies, scaling, optimizers."""
