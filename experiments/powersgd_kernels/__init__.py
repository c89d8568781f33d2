"""Compares PowerSGD's arithmetic with that of torch's hook."""
