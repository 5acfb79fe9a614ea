"""Batch norms whose running statistics are those of whole mini-batches."""
