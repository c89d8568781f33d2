"""Counts what a reader of the source has to go through."""
