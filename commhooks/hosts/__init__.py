"""Adapts schemes to hosts other than DistributedDataParallel, and to programs without a host."""

from __future__ import annotations

from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from commhooks.hosts.collectives import Collectives
from commhooks.hosts.functions import all_gather, all_reduce, reduce_scatter
from commhooks.hosts.groups import process_group
from commhooks.hosts.scheme_group import SchemeGroup

if TYPE_CHECKING:
    from commhooks.hosts.fsdp2_replicate import replicate

__all__ = [
    "Collectives",
    "SchemeGroup",
    "all_gather",
    "all_reduce",
    "process_group",
    "reduce_scatter",
    "replicate",
]


def __getattr__(name: str) -> Any:
    # Importing FSDP2 takes a second, and most programs have none of it.
    if name == "replicate":
        return resolve_name("commhooks.hosts.fsdp2_replicate:replicate")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
