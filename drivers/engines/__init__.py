"""The processes of a cluster: started on this host, or joined under torchrun."""
