"""Where workers run: the contract of an engine, processes of this host, torchrun, Ray, threads, and the cluster on top."""
