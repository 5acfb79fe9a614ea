"""What the workers did when: recorded steps, what they show, and how they are drawn."""
