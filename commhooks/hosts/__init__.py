"""Puts schemes into hosts other than DistributedDataParallel, a module per library.

Frameworks that own the training loop have a ``CommHook``, which registers a scheme on the model
that the framework has wrapped, and saves and loads the states of all ranks as one; import their
modules by name. Programs that take a process group have :func:`process_group`.
"""

# Modules, in the order in which to read them:
#
# _framework_hook                                   a hook on a model that a framework has wrapped
# lightning, fabric, accelerate, transformers, ray  frameworks
# _composable                                       replicate() of torch.distributed._composable
# _process_group                                    a process group that runs a scheme
# megatron                                          Megatron-Core
# torchft                                           torchft

from __future__ import annotations

from collections.abc import Callable
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from commhooks.hosts._process_group import SchemeGroup, process_group

__all__ = ["SchemeGroup", "host_of", "process_group"]

# For classes of modules that reduce gradients themselves: the function that registers a hook, and
# the arguments of ``register`` that it takes. By name: importing them takes a second, and most
# models have none.
_REGISTERS: dict[str, tuple[str, set[str]]] = {
    "FSDPModule": (
        "commhooks.fsdp._fsdp2:register_on_fsdp2",
        {"verification", "replicate_group", "auto"},
    ),
    "FullyShardedDataParallel": ("commhooks.fsdp._fsdp1:register_on_fsdp1", {"verification"}),
    "DDP": ("commhooks.hosts._composable:register_on_composable", set()),
}
_REPLICATE = "torch.distributed._composable.replicate"  # makes modules of a class "DDP"


def host_of(model: object) -> tuple[Callable[..., Any], set[str]] | None:
    """Returns the registration function of another host's model, and its further arguments.

    None for DistributedDataParallel, and for models of no known host.
    """
    name = _class_of(model) if isinstance(model, nn.Module) else ""
    if not name:
        return None
    place, takes = _REGISTERS[name]
    return resolve_name(place), takes


def _class_of(model: nn.Module) -> str:
    if any(base.__module__ == _REPLICATE for base in type(model).__mro__):
        return "DDP"
    kinds = [base for module in model.modules() for base in type(module).__mro__]
    if DistributedDataParallel in kinds:
        return ""
    names = [
        base.__name__ for base in kinds if base.__module__.startswith("torch.distributed.fsdp")
    ]
    return next((name for name in names if name in _REGISTERS), "")


def __getattr__(name: str) -> Any:
    if name in ("SchemeGroup", "process_group"):
        return resolve_name(f"commhooks.hosts._process_group:{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
