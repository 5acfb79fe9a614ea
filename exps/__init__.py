"""Experiments and benchmarks. The docstring of each gives its question, its command and its finding."""
