"""Simulates programs: how long they take, without computing anything."""
