"""Mirrors ``torch.distributed.algorithms.ddp_comm_hooks``: scripts change the prefix of an import.

Example:
    >>> from commhooks.ddp_comm_hooks import powerSGD_hook as powerSGD
    >>> state = powerSGD.PowerSGDState(process_group=None, matrix_approximation_rank=1)
    >>> ddp_model.register_comm_hook(state, powerSGD.powerSGD_hook)
"""

import sys
from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import Any

from torch import nn

from commhooks.ddp_comm_hooks import debugging_hooks as debugging
from commhooks.ddp_comm_hooks import default_hooks as default
from commhooks.ddp_comm_hooks import optimizer_overlap_hooks as optimizer_overlap
from commhooks.ddp_comm_hooks import post_localSGD_hook
from commhooks.ddp_comm_hooks import powerSGD_hook as powerSGD
from commhooks.ddp_comm_hooks import quantization_hooks as quantization

__all__ = [
    "DDPCommHookType",
    "debugging",
    "default",
    "optimizer_overlap",
    "post_localSGD_hook",
    "powerSGD",
    "quantization",
    "register_ddp_comm_hook",
]

# A partial in the body of an Enum is a method in later Pythons (3.13 warns): it has to be marked.
if sys.version_info >= (3, 11):
    from enum import member
else:

    def member(value: Any) -> Any:
        return value


def _register(comm_hook: Callable[..., Any], model: Any, state: Any) -> None:
    model.register_comm_hook(state, comm_hook)


def _register_powersgd(
    comm_hook: Callable[..., Any],
    model: Any,
    state: Any,
    matrix_approximation_rank: int,
    start_powerSGD_iter: int = 1_000,
) -> None:
    """Registers a PowerSGD hook; ``state`` is a process group, as for the other hooks."""
    settings = powerSGD.PowerSGDState(
        process_group=state,
        matrix_approximation_rank=matrix_approximation_rank,
        start_powerSGD_iter=start_powerSGD_iter,
    )
    model.register_comm_hook(settings, comm_hook)


def _powersgd(comm_hook: Callable[..., Any], rank: int) -> Any:
    return member(partial(_register_powersgd, comm_hook=comm_hook, matrix_approximation_rank=rank))


class DDPCommHookType(Enum):
    """Lists torch's hooks; calling a value registers the hook.

    Example:
        >>> DDPCommHookType.ALLREDUCE.value(model=ddp_model, state=process_group)
    """

    ALLREDUCE = member(partial(_register, comm_hook=default.allreduce_hook))
    FP16_COMPRESS = member(partial(_register, comm_hook=default.fp16_compress_hook))
    BF16_COMPRESS = member(partial(_register, comm_hook=default.bf16_compress_hook))
    QUANTIZE_PER_TENSOR = member(
        partial(_register, comm_hook=quantization.quantization_pertensor_hook)
    )
    QUANTIZE_PER_CHANNEL = member(
        partial(_register, comm_hook=quantization.quantization_perchannel_hook)
    )
    POWER_SGD = _powersgd(powerSGD.powerSGD_hook, 1)
    POWER_SGD_RANK2 = _powersgd(powerSGD.powerSGD_hook, 2)
    BATCHED_POWER_SGD = _powersgd(powerSGD.batched_powerSGD_hook, 1)
    BATCHED_POWER_SGD_RANK2 = _powersgd(powerSGD.batched_powerSGD_hook, 2)
    NOOP = member(partial(_register, comm_hook=debugging.noop_hook))


def register_ddp_comm_hook(
    comm_hook_type: DDPCommHookType, model: nn.Module, state: Any = None
) -> None:
    """Registers a hook by its type on a DistributedDataParallel model.

    Args:
        comm_hook_type: the type of the hook.
        model: torch's DistributedDataParallel or ``ddp_core.DistributedDataParallel``.
        state: a process group. None: the group of the model.

    Raises:
        TypeError: the type is of torch's enumeration, and would register torch's hook, or is none.

    Example:
        >>> register_ddp_comm_hook(DDPCommHookType.FP16_COMPRESS, ddp_model)
    """
    if not isinstance(comm_hook_type, DDPCommHookType):
        kind = type(comm_hook_type)
        raise TypeError(
            f"register_ddp_comm_hook takes a commhooks.ddp_comm_hooks.DDPCommHookType, got "
            f"{kind.__module__}.{kind.__qualname__}: import it from commhooks.ddp_comm_hooks, too"
        )
    comm_hook_type.value(model=model, state=state)
