"""A worker's part of a checkpoint, copies for its neighbours, what is held aside, and parameters made in their place."""
