"""Mini-batches divided into micro-batches, and what the micro-batches give put together."""
