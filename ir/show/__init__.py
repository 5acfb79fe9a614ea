"""Seeing a Pipe: its flow of values, with shapes and figures, as text, table, diagram and picture."""
