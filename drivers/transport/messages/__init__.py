"""What carries messages between the controller and the workers: RPC between hosts, sockets on one host."""
