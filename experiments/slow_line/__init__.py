"""Measures which share of the time ranks compute, on slow lines, with local steps."""
