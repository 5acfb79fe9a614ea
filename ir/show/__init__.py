"""Drawings of a Pipe: as text, as a table, as SVG, and in the languages of other tools."""
