"""What a process needs to run a stage: its graph, its forward and its backward. Nothing here traces."""
