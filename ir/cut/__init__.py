"""Which node goes to which stage, and where a cut is possible."""
