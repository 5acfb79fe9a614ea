"""What the controller and the workers say to each other, and how the controller waits for answers."""
