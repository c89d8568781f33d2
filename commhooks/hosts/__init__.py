<<<<<<< HEAD
"""Adapts hooks to hosts other than DistributedDataParallel."""
=======
"""Runs hooks inside the libraries that train models; each module is imported by its name."""
>>>>>>> world15
