"""What a run does after it has lost a worker: another process in its place, and the state of the newest point."""
