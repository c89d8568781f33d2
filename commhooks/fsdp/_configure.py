"""Configures a new hook for a host that reduces gradients and shards parameters itself (FSDP)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from commhooks.hook._parameters import Parameters
from commhooks.hook._sharded import check_returns_shards
from commhooks.hook._state import HookState
from commhooks.verify import Verification

__all__ = ["configure_sharded_hook"]


def configure_sharded_hook(
    hook: HookState,
    model: nn.Module,
    known: Parameters,
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    shards_for: str,
    verification: Verification | None,
    values: Callable[[], Mapping[str, Tensor]] = dict,
) -> None:
    """Configures a new hook for its host, before the handshake of the ranks (``HookState.agree``).

    Args:
        hook: the hook, made without a model.
        model: the model that the host has sharded.
        known: the model's parameters as they lie in the host's buckets.
        group: ranks to average over.
        device: the device of the gradients.
        shards_for: name of the host if each rank needs only its shard of the mean; "" if each rank
            needs the whole mean.
        verification: compares steps with the dense mean; None: no step.
        values: returns the parameters, or shards of them, that ranks have in common, by name.

    Raises:
        RegistrationError: the scheme cannot return a shard.
    """
    hook.call_monitor.disable()  # the host's guard raises if the hook would not run
    if shards_for:
        check_returns_shards(hook.scheme, shards_for)
        hook.shards_for, hook.compared_with = shards_for, "reduce-scatter"
    hook.target.adopt_sharded(model, known, group, device, values)
    hook._verify_with(verification)
    hook.fixed_group_reason = (
        "FSDP decides over which ranks it shards; shard a model over the other ranks, and register "
        "a hook on it"
    )
