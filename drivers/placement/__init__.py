"""Which worker has what: the stages of a Pipe on workers, replicas, and who adds up which gradients."""
