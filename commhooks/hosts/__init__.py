"""Puts schemes into what averages gradients besides DistributedDataParallel, a module per host.

Frameworks that own the training loop have a ``CommHook``, which registers a scheme on the model
that the framework has wrapped, and saves and loads the states of all ranks as one; import their
modules by name. Programs that take a process group have :func:`process_group`.
"""

from commhooks.hosts._process_group import SchemeGroup, process_group

__all__ = ["SchemeGroup", "process_group"]
