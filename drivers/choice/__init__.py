"""What `schedule="auto"` runs within `memory=`: by counted bytes, and by costs that are guessed until they are measured."""
