"""The state of a worker: its part of a checkpoint, copies for its neighbours, what is held aside, and parameters made here."""
