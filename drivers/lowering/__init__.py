"""Makes the program of every worker from a Pipe and a schedule."""
