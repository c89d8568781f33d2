"""Measures quality, memory and time of schemes where parameters are sharded."""
