"""Puts schemes into what averages gradients besides DistributedDataParallel, one module per host.

Frameworks that own the training loop have a ``CommHook``, which registers a scheme on the model
that the framework has wrapped, and saves and loads the states of all ranks as one; import their
modules by name. FSDP is reached by :func:`commhooks.register`. Programs without a host have
functions and a process group.
"""

from __future__ import annotations

from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from commhooks.hosts.collectives import Collectives
from commhooks.hosts.functions import all_gather, all_reduce, reduce_scatter
from commhooks.hosts.scheme_group import SchemeGroup, process_group

if TYPE_CHECKING:
    from commhooks.hosts.fsdp2_parameters import gather_parameters
    from commhooks.hosts.fsdp2_replicate import replicate

__all__ = [
    "Collectives",
    "SchemeGroup",
    "all_gather",
    "all_reduce",
    "gather_parameters",
    "process_group",
    "reduce_scatter",
    "replicate",
]


# Importing FSDP2 takes a second, and most programs have none of it.
_ON_FSDP2 = {
    "gather_parameters": "commhooks.hosts.fsdp2_parameters",
    "replicate": "commhooks.hosts.fsdp2_replicate",
}


def __getattr__(name: str) -> Any:
    if name in _ON_FSDP2:
        return resolve_name(f"{_ON_FSDP2[name]}:{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
