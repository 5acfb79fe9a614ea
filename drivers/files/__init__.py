"""Checkpoints: the files in a folder, and the folders that a run leaves. Who writes what, and reads what, is elsewhere."""
