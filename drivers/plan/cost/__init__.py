"""What a program costs, without computing anything: time by a simulation, and bytes."""
