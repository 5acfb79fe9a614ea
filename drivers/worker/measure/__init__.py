"""What a worker notes while it runs: times, bytes, outputs, what a model asks of numbers."""
