"""Fits a new hook to a host that shards parameters over ranks, such as FSDP."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from commhooks.hook.parameters import Parameters
from commhooks.hook.sharded_bucket import need_shards
from commhooks.hook.state import HookState
from commhooks.hook.verify import Verification, attach

__all__ = ["settle"]


def settle(
    hook: HookState,
    model: nn.Module,
    known: Parameters,
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    shards_for: str,
    verification: Verification | None,
) -> None:
    """Fits a hook that has not met other ranks yet to its host.

    Args:
        known: the model's parameters as buckets have them.
        group: ranks to average over.
        device: of gradients.
        shards_for: the host, if it needs one shard of each mean on each rank; "": whole means.
        verification: of its steps; None: none.

    Raises:
        RegistrationError: the scheme cannot return a shard.
    """
    hook._attendance.dismiss()  # the host's guard says where it would not run
    if shards_for:
        need_shards(hook.scheme, shards_for)
        hook.shards_for, hook.compared_with = shards_for, "reduce-scatter"
    hook._binding.adopt_sharded(model, known, group, device)
    if verification is not None:
        # The dense mean of a shard travels in the bucket's own exchange.
        attach(hook, verification, further_rounds=int(bool(shards_for)))
    hook.stays = "its host decides over which ranks it shards; register a hook on a model of others"
