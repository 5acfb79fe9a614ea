"""One choice: of the schedule, the forwards that are computed again and the number of micro-batches, within limits."""
