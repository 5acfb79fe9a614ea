"""Rows that a worker loads itself."""
