"""A graph compiler for pipeline parallelism in PyTorch."""
