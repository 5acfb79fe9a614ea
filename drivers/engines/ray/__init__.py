"""Workers as actors of Ray, which places them, says when one is gone, and starts others."""
