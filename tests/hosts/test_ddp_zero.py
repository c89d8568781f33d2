"""Torch's hooks that overlap a ZeroRedundancyOptimizer, where they refuse.

What they do elsewhere is in ``test_torch_optimizers``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from commhooks.ddp_comm_hooks import ddp_zero_hook, default_hooks
from ddp_core import DistributedDataParallel
from tests.tools.harness import run_ranks
from tests.tools.training import mlp, outcome


def _refusals(rank: int, world_size: int, name: str) -> list[Any]:
    results = []
    for ddp_class, overlaps in (
        (TorchDDP, False),
        (TorchDDP, True),
        (DistributedDataParallel, True),
    ):
        model = ddp_class(mlp())
        zero = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.SGD, overlap_with_ddp=overlaps, lr=0.1
        )
        make = getattr(ddp_zero_hook, name)
        results.append(outcome(make, default_hooks.allreduce_hook, model, zero))
    return results


@pytest.mark.parametrize("name", ddp_zero_hook.__all__)
def test_what_cannot_overlap_is_refused(name: str) -> None:
    ((plain, gloo, core),) = run_ranks(_refusals, 1, name)
    assert "overlap_with_ddp=True" in plain[1]
    assert "Gloo" in gloo[1]
    assert core[1].startswith(f"{name}: torch's function takes a model in torch's")
    assert "commhooks.ZeroOptimizer" in core[1]
