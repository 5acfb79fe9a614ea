"""What all rooms of drivers/ use: their errors, and Ctrl-C where it must wait."""
