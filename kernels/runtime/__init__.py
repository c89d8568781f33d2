"""Declares, checks, compiles and launches ops."""
