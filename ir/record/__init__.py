"""What was traced and compiled: the records that the passes fill, and how their graphs are read."""
