"""Makes tokens with the stages of a driver: its arguments, and the graphs that make tokens."""
