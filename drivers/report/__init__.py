"""What a recorded step shows: where each worker's time went, what was predicted, and how it is drawn."""
