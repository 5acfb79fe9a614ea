"""From a Pipe and a schedule to the program of every worker."""
