"""Counts what one bucket costs the host of a GPU."""
