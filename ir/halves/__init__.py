"""A stage's forward and backward as graphs of operations, cut into F, I and W."""
