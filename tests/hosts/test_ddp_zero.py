"""Torch's hooks that overlap a ZeroRedundancyOptimizer, where they refuse.

What they do elsewhere is in ``test_torch_optimizers``.
"""

from __future__ import annotations

import pytest
import torch
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from commhooks.ddp_comm_hooks import ddp_zero_hook, default_hooks
from ddp_core import DistributedDataParallel
from tests.tools.harness import on_ranks
from tests.tools.training import mlp


@pytest.mark.parametrize("name", ddp_zero_hook.__all__)
@on_ranks(1)
def test_what_cannot_overlap_is_refused(name: str) -> None:
    of_torch = f"{name}: torch's function takes a model in torch's.*commhooks.ZeroOptimizer"
    for ddp_class, overlaps, text in (
        (TorchDDP, False, "overlap_with_ddp=True"),
        (TorchDDP, True, "Gloo"),
        (DistributedDataParallel, True, f"^{of_torch}"),
    ):
        model = ddp_class(mlp())
        zero = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.SGD, overlap_with_ddp=overlaps, lr=0.1
        )
        with pytest.raises(Exception, match=text):
            getattr(ddp_zero_hook, name)(default_hooks.allreduce_hook, model, zero)
