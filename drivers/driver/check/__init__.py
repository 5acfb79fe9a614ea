"""Comparing steps that must give the same numbers: a few rows in two divisions, the workers and the plain model."""
