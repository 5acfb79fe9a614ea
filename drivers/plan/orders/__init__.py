"""The schedules. Each is a function that gives the order of every worker's computations."""
