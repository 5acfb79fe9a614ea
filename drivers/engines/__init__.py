"""Where workers run: the contract of an engine, processes of this host, torchrun, threads, and the cluster on top."""
