"""Planted bugs, each with the test that finds it: ``python -m tests.mutants``."""
