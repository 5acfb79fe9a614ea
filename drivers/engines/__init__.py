"""Where workers run: the contract of an engine, processes of this host, torchrun, Ray, workers that join, threads, and the cluster."""
