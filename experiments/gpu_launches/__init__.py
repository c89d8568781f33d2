"""Counts the launches and the host time of one bucket on a GPU."""
