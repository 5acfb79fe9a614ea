"""Workers that join a cluster from any shell of any host, with its secret, and take the places of those that are lost."""
