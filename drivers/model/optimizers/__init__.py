"""What an optimizer on the workers takes, and what it leaves behind in this process."""
