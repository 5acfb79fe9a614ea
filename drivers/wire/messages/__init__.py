"""What carries messages between the controller and the workers: sockets on one host, RPC between hosts."""
