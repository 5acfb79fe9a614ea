"""What runs inside the worker processes."""
