"""What fits: the schedule, the forwards that are computed again, and the micro-batches, for so many bytes on each worker."""
