"""Data that is loaded where it is used: the loader of indices, and which workers have which datasets."""
