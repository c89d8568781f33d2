"""Compares the time of every CPU kernel with that of a copy of the bucket."""
