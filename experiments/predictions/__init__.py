"""Compares predictions with measurements that others published."""
