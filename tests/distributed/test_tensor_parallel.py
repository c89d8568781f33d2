"""DistributedDataParallel beside tensor parallelism: shards are averaged, and names stay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

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


class _Tied(nn.Module):
    """Two modules share one parameter, whose parts are of different sizes; another is frozen."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(7, 33, bias=False), nn.Linear(7, 33, bias=False)
        self.first.weight = self.second.weight = nn.Parameter(
            distribute_tensor(torch.randn(33, 7), mesh, [Shard(0)])
        )
        self.register_parameter(
            "frozen",
            nn.Parameter(distribute_tensor(torch.ones(33), mesh, [Shard(0)]), requires_grad=False),
        )
        self.shapes: list[torch.Size] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.shapes = [one.weight.shape for one in (self.first, self.second)]
        # All inputs are the same: gradients are complete on every rank of the other dimension.
        weights = [one.weight.full_tensor() for one in (self.first, self.second)]
        return (x @ weights[0].t() + 2 * x @ weights[1].t()).square()


def _tied(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    replica, place = mesh["dp"].get_local_rank(), mesh["tp"].get_local_rank()
    model: Any = DistributedDataParallel(_Tied(mesh["tp"]), device_mesh=mesh["dp"])
    names = [name for name, one in model.named_parameters() if one.requires_grad]
    assert names == ["module.first.weight"]
    assert model.module.first.weight is model.module.second.weight
    whole: Any = _Tied(mesh["tp"]).first.weight.full_tensor().detach().requires_grad_()
    inputs = [torch.randn(5, 7, generator=torch.Generator().manual_seed(one)) for one in range(2)]
    model(inputs[replica]).sum().backward()
    assert model.module.shapes == [torch.Size([33, 7])] * 2
    loss: Any = sum((3 * x @ whole.t()).square().sum() for x in inputs)
    loss.div(2).backward()
    wanted = whole.grad.split(17)[place]
    torch.testing.assert_close(model.module.first.weight.grad, wanted, rtol=1e-4, atol=1e-4)


def test_shared_uneven_and_frozen_parameters_stay_what_they_are() -> None:
    run_ranks(_tied, 4)


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


class _Recomputed(nn.Module):
    def __init__(self, inner: nn.Module, how: str) -> None:
        super().__init__()
        self.inner, self.how = inner, how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "not":
            return self.inner(x)  # type: ignore[no-any-return]
        again = self.how == "reentrant"
        return checkpoint(self.inner, x, use_reentrant=again)  # type: ignore[no-any-return]


def _recomputes(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    found = []
    for how in ("not", "other", "reentrant"):
        module = _Recomputed(_build(mesh), how)
        model = DistributedDataParallel(module, device_mesh=mesh["dp"])
        model(torch.ones(2, 33, requires_grad=True)).square().sum().backward()
        found.append([one.grad for one in model.parameters()])
        assert not any(isinstance(one, DTensor) for one in vars(module.inner[0]).values())
    for other in found[1:]:
        assert all(torch.equal(one, two) for one, two in zip(found[0], other, strict=True))


def test_activation_checkpointing_finds_the_shards_of_its_layers() -> None:
    run_ranks(_recomputes, 2)
