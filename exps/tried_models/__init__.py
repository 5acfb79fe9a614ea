"""Models to try pippy on, in tiny sizes with random weights, and what they are called with."""
