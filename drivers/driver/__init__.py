"""What the user holds: the drivers, and what one does with a call."""
