"""Where workers run: the contract of an engine, local processes, torchrun, Ray, workers that join, threads, and the cluster."""
