"""A step of a driver: what it is asked for, what it gives back, and the update after it."""
