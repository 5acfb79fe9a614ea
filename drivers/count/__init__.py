"""Counts what workers hold before anything runs."""
