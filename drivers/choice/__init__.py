"""`schedule="auto"`: the limits that are given, the steps that are measured, and the choice."""
