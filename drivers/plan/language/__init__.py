"""The instructions of all workers, and how they are written."""
