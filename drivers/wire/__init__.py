"""All that carries bytes between processes."""
