"""Measures how much of a limited line each collective uses on Gloo."""
