"""DistributedDataParallel beside tensor parallelism: shards are averaged, and names stay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import commhooks
from ddp_core import DistributedDataParallel
from tests.distributed.harness import run_ranks
from tests.distributed.test_fsdp2 import backward, model_of

PLAN: dict[str, Any] = {"0": ColwiseParallel(), "2": RowwiseParallel()}
NAMES = ["module.0.weight", "module.0.bias", "module.2.weight", "module.2.bias"]


def _build(mesh: Any) -> nn.Module:
    model = model_of((33, 64, 7))
    parallelize_module(model, mesh["tp"], PLAN)
    return model


def _train(model: nn.Module, mesh: Any, steps: int = 3) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    replica = mesh["dp"].get_local_rank()
    for step in range(steps):
        optimizer.zero_grad()
        backward(model, step, replica)
        optimizer.step()
    return [one.detach().clone() for one in optimizer.param_groups[0]["params"]]


def _run(rank: int, world_size: int, name: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    theirs = TorchDDP(_build(mesh), device_mesh=mesh["dp"])
    ours = DistributedDataParallel(_build(mesh), device_mesh=mesh["dp"])
    hook = commhooks.register(ours, name)
    wanted, found = _train(theirs, mesh), _train(ours, mesh)
    assert [key for key, _ in ours.named_parameters()] == NAMES
    assert not any(isinstance(one, DTensor) for one in ours.parameters())
    assert hook.step == 3
    for one, other in zip(wanted, found, strict=True):
        if name == "none":
            assert torch.equal(one, other)
        else:
            torch.testing.assert_close(one, other, rtol=0.05, atol=0.01)
    state = hook.state_dict()
    again = commhooks.register(DistributedDataParallel(_build(mesh), device_mesh=mesh["dp"]), name)
    again.load_state_dict(state)
    assert again.step == 3


@pytest.mark.parametrize("name", ["none", "int8", "powersgd"])
def test_shards_are_averaged_and_names_stay(name: str) -> None:
    run_ranks(_run, 4, name)


def _raises(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = DistributedDataParallel(_build(mesh), device_mesh=mesh["dp"])
    with pytest.raises(RuntimeError):
        model(torch.randn(3, 5))
    assert not any(isinstance(one, DTensor) for one in vars(model.module[0]).values())
    backward(model, 0, 0)
    assert all(one.grad is not None for one in model.parameters())


def test_a_forward_pass_that_raised_leaves_no_old_tensors() -> None:
    run_ranks(_raises, 2)
