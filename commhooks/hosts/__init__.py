"""Puts schemes into what averages gradients besides DistributedDataParallel, one module per host.

Frameworks that own the training loop have a ``CommHook``, which registers a scheme on the model
that the framework has wrapped, and saves and loads the states of all ranks as one. FSDP is reached
by :func:`commhooks.register`. Nothing is imported here: a module needs its host only.
"""

__all__: list[str] = []
