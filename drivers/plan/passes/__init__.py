"""What is added to any schedule: sends and receives, forwards that run again, backwards in halves."""
