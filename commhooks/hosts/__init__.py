"""Puts schemes into the frameworks that own the training loop, one module per framework.

Each module has a ``CommHook``, which registers a scheme on the model that the framework has wrapped
in DistributedDataParallel, and saves and loads the states of all ranks as one. Nothing is imported
here: a module needs its framework only.
"""

__all__: list[str] = []
