"""The state of a driver's model: filled, saved and loaded."""
