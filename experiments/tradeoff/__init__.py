"""Measures the errors and bits of every scheme on recorded gradients."""
