"""Training: the loop around a driver, for those who do not want to write it."""
