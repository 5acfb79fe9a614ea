"""The schedules: each a function that gives the order of the passes of every worker."""
