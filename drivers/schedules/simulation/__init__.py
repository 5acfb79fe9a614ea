"""Programs run on a clock, without computing anything."""
