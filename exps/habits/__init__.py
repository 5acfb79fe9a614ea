"""Models whose layers have the habits that make a step of micro-batches differ from a step of the whole batch."""
