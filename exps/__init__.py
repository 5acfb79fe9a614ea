"""Experiments and benchmarks; each says its question, its command and its finding."""
