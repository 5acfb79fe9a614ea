"""Running a stage: its graph, its forward and its backward. Nothing here imports the tracer."""
