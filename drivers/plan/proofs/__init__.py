"""Proofs that a program can run."""
