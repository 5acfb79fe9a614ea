"""What the workers of Ray and those that join have in common: processes that pippy did not start, each with two connections."""
