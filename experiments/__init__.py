"""Studies: ``python -m experiments.<study>``; each has a command, a seed and a result."""
