"""DistributedDataParallel beside tensor parallelism: shards are averaged, and names stay."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

import commhooks
from commhooks.errors import CheckpointError
from ddp_core import DistributedDataParallel
from tests.fsdp.test_fsdp2 import backward, model_of
from tests.tools.harness import on_ranks
from tests.tools.training import through_file

PLAN: dict[str, Any] = {"0": ColwiseParallel(), "2": RowwiseParallel()}
NAMES = ["module.0.weight", "module.0.bias", "module.2.weight", "module.2.bias"]


def _build(mesh: Any) -> nn.Module:
    model = model_of((33, 64, 7))
    parallelize_module(model, mesh["tp"], PLAN)
    return model


def _trained_parameters(model: nn.Module, mesh: Any, steps: int = 3) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    replica = mesh["dp"].get_local_rank()
    for step in range(steps):
        optimizer.zero_grad()
        backward(model, step, replica)
        optimizer.step()
    return [parameter.detach().clone() for parameter in optimizer.param_groups[0]["params"]]


@pytest.mark.parametrize("name", ["none", "int8", "powersgd"])
@on_ranks(4)
def test_shards_are_averaged_and_names_stay(name: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch_model = TorchDDP(_build(mesh), device_mesh=mesh["dp"])
    core_model = DistributedDataParallel(_build(mesh), device_mesh=mesh["dp"])
    hook = commhooks.register(core_model, name)
    wanted, results = _trained_parameters(torch_model, mesh), _trained_parameters(core_model, mesh)
    assert [key for key, _ in core_model.named_parameters()] == NAMES
    assert not any(isinstance(parameter, DTensor) for parameter in core_model.parameters())
    assert hook.step == 3
    for value, other in zip(wanted, results, strict=True):
        if name == "none":
            assert torch.equal(value, other)
        else:
            torch.testing.assert_close(value, other, rtol=0.05, atol=0.01)
    state = hook.state_dict()
    again = commhooks.register(DistributedDataParallel(_build(mesh), device_mesh=mesh["dp"]), name)
    again.load_state_dict(state)
    assert again.step == 3


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

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.shapes = [value.weight.shape for value in (self.first, self.second)]
        # All inputs are the same: gradients are complete on every rank of the other dimension.
        weights = [value.weight.full_tensor() for value in (self.first, self.second)]
        return (inputs @ weights[0].t() + 2 * inputs @ weights[1].t()).square()


@on_ranks(4)
def test_shared_uneven_and_frozen_parameters_stay_what_they_are() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    replica, place = mesh["dp"].get_local_rank(), mesh["tp"].get_local_rank()
    model: Any = DistributedDataParallel(_Tied(mesh["tp"]), device_mesh=mesh["dp"])
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert names == ["module.first.weight"]
    assert model.module.first.weight is model.module.second.weight
    whole: Any = _Tied(mesh["tp"]).first.weight.full_tensor().detach().requires_grad_()
    inputs = [
        torch.randn(5, 7, generator=torch.Generator().manual_seed(value)) for value in range(2)
    ]
    model(inputs[replica]).sum().backward()
    assert model.module.shapes == [torch.Size([33, 7])] * 2
    loss: Any = sum((3 * tensor @ whole.t()).square().sum() for tensor in inputs)
    loss.div(2).backward()
    wanted = whole.grad.split(17)[place]
    torch.testing.assert_close(model.module.first.weight.grad, wanted, rtol=1e-4, atol=1e-4)


@on_ranks(2)
def test_a_forward_pass_that_raised_leaves_no_old_tensors() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = DistributedDataParallel(_build(mesh), device_mesh=mesh["dp"])
    with pytest.raises(RuntimeError):
        model(torch.randn(3, 5))
    assert not any(isinstance(value, DTensor) for value in vars(model.module[0]).values())
    backward(model, 0, 0)
    assert all(parameter.grad is not None for parameter in model.parameters())


class _Recomputed(nn.Module):
    def __init__(self, inner: nn.Module, how: str) -> None:
        super().__init__()
        self.inner, self.how = inner, how

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.how == "not":
            return self.inner(inputs)  # type: ignore[no-any-return]
        again = self.how == "reentrant"
        return checkpoint(self.inner, inputs, use_reentrant=again)  # type: ignore[no-any-return]


@on_ranks(2)
def test_activation_checkpointing_finds_the_shards_of_its_layers() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    results = []
    for how in ("not", "other", "reentrant"):
        module = _Recomputed(_build(mesh), how)
        model = DistributedDataParallel(module, device_mesh=mesh["dp"])
        model(torch.ones(2, 33, requires_grad=True)).square().sum().backward()
        results.append([parameter.grad for parameter in model.parameters()])
        assert not any(isinstance(value, DTensor) for value in vars(module.inner[0]).values())
    for other in results[1:]:
        assert all(
            torch.equal(value, wanted) for value, wanted in zip(results[0], other, strict=True)
        )


class _Net(nn.Module):
    """Has layers that are cut, and a matrix of two modules, whose parts are of several sizes."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = model_of((5, 8, 3))
        self.first, self.second = nn.Linear(3, 7, bias=False), nn.Linear(3, 7, bias=False)
        self.second.weight = self.first.weight
        self.rows = nn.Parameter(torch.randn(8, 3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        inputs = self.layers(inputs)
        for matrix in (self.first.weight, self.second.weight, self.rows):
            whole = matrix.full_tensor() if isinstance(matrix, DTensor) else matrix
            inputs = inputs @ whole.t() @ whole
        return inputs


def _cut(net: _Net, mesh: Any) -> None:
    """Cuts along one dimension of a mesh, or along two."""
    parallelize_module(net.layers, mesh["tp"], PLAN)
    cuts, rows = [Shard(0)], distribute_tensor(net.rows.detach(), mesh["tp"], [Shard(0)])
    mesh = mesh["tp"] if mesh.ndim == 2 else mesh["outer", "tp"]
    if mesh.ndim == 2:
        cuts = [Shard(0), Shard(1)]
        # The inner dimension cuts first, as that of tensor parallelism does in FSDP2.
        outer, inner = mesh.get_coordinate()
        rows = DTensor.from_local(
            net.rows.detach()[4 * inner + 2 * outer :][:2],
            mesh,
            [_StridedShard(0, split_factor=2), Shard(0)],
            shape=net.rows.shape,
            stride=net.rows.stride(),
        )
    net.rows = nn.Parameter(rows)
    weight = nn.Parameter(distribute_tensor(net.first.weight.detach(), mesh, cuts))
    net.first.weight = net.second.weight = weight


LAYOUTS: dict[str, tuple[int, ...]] = {
    "2 x 2": (2, 2),
    "1 x 4": (1, 4),
    "4 x 1": (4, 1),
    "1 x 2 x 2": (1, 2, 2),
    "without": (4,),
}


def _laid_out(layout: str, seed: int) -> tuple[Any, torch.optim.Optimizer]:
    sizes, net = LAYOUTS[layout], _Net(seed)
    names = ("dp", "outer", "tp") if len(sizes) == 3 else ("dp", "tp")
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names[: len(sizes)])
    if mesh.ndim > 1:
        _cut(net, mesh)
    model = DistributedDataParallel(net, device_mesh=mesh["dp"])
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def _step(model: Any, optimizer: torch.optim.Optimizer, seed: int) -> torch.Tensor:
    """Trains on one input of all ranks; returns what the model says of it before."""
    inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(seed))
    y = model(inputs)
    optimizer.zero_grad()
    y.square().mean().backward()
    optimizer.step()
    return y.detach()  # type: ignore[no-any-return]


@on_ranks(4)
def test_a_checkpoint_is_the_same_on_every_mesh(rank: int, tmp_path: Path) -> None:
    folder = str(tmp_path)
    model, optimizer = _laid_out("2 x 2", 0)
    hook = commhooks.register(model, "topk", ratio=0.4)
    for step in range(3):
        _step(model, optimizer, step)
    for state in (model.state_dict(), model.module.state_dict(), get_model_state_dict(model)):
        assert all(isinstance(value, DTensor) for value in state.values())
    assert model.module.layers.state_dict().keys() == {"0.weight", "0.bias", "2.weight", "2.bias"}
    state = model.state_dict(keep_vars=True)
    assert state["module.first.weight"].requires_grad
    # The memory is that of the parameters: nothing is copied or gathered.
    local = model.state_dict()["module.first.weight"].to_local()
    assert local.data_ptr() == model.module.first.weight.data_ptr()
    saved = {
        "model": model.module.state_dict(),
        "optimizer": get_optimizer_state_dict(model, optimizer),
        "hook": hook,
    }
    dcp.save(saved, checkpoint_id=folder)
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    whole = {name: value.clone() for name, value in whole.items()}
    wanted = [_step(model, optimizer, 9)]

    for layout in LAYOUTS:
        model, optimizer = _laid_out(layout, 1)
        loaded = {
            "model": model.module.state_dict(),
            "optimizer": get_optimizer_state_dict(model, optimizer),
        }
        dcp.load(loaded, checkpoint_id=folder)
        model.module.load_state_dict(loaded["model"])
        set_optimizer_state_dict(model, optimizer, loaded["optimizer"])
        results = [
            _step(model, optimizer, seed) for seed in (9, 10)
        ]  # the second after AdamW's step
        wanted += results[len(wanted) :]
        torch.testing.assert_close(results, wanted, msg=layout)
        model, optimizer = _laid_out(layout, 2)
        hook = commhooks.register(model, "topk", ratio=0.4)
        if layout == "2 x 2":
            commhooks.load_dcp(hook, folder)
            assert hook.step == 3
        else:
            with pytest.raises(CheckpointError, match=r"it has piece . of 2 .* this rank trains"):
                commhooks.load_dcp(hook, folder)
            hook.call_monitor.suppressed = True
        # Whole tensors, as without tensor parallelism: each rank takes its own part.
        broadcast = layout == "1 x 2 x 2"
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
        given = {} if broadcast and rank else dict(whole)
        set_model_state_dict(model, given, options=options)
        with torch.no_grad():
            y = model(torch.randn(4, 5, generator=torch.Generator().manual_seed(9)))
        torch.testing.assert_close(y, wanted[0], msg=layout)


@on_ranks(2)
def test_files_of_each_rank_load_with_shards_or_dtensors(rank: int) -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))

    def built(seed: int) -> tuple[Any, torch.optim.Optimizer]:
        net = _Net(seed)
        _cut(net, mesh)
        model = DistributedDataParallel(net, device_mesh=mesh["dp"])
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    model, optimizer = built(0)
    for step in range(2):
        _step(model, optimizer, step)
    state = through_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    # What earlier releases wrote, a file for each rank: shards.
    plain = {name: value.to_local().clone() for name, value in model.state_dict().items()}
    older = copy.deepcopy(optimizer.state_dict())
    for values in older["state"].values():
        values.update({k: v.to_local() for k, v in values.items() if isinstance(v, DTensor)})
    wanted = [_step(model, optimizer, seed) for seed in (9, 10)]
    for parameters, moments in ((state["model"], state["optimizer"]), (plain, older)):
        model, optimizer = built(1)
        assert str(model.load_state_dict(parameters)) == "<All keys matched successfully>"
        optimizer.load_state_dict(moments)  # before its first step
        for seed, element in zip((9, 10), wanted, strict=True):
            assert torch.equal(_step(model, optimizer, seed), element)
        optimizer.load_state_dict(moments)  # and after it
        assert all(not isinstance(v, DTensor) for s in optimizer.state.values() for v in s.values())
    with pytest.raises(RuntimeError, match=r'Missing key\(s\).*"module.rows"'):
        model.load_state_dict({k: v for k, v in state["model"].items() if "rows" not in k})
    prefixed = model.module.first.state_dict(prefix="deep.")
    assert type(prefixed["deep.weight"]) is DTensor
    turned = init_device_mesh("cpu", (2, 1), mesh_dim_names=("tp", "dp"))
    foreign = DTensor.from_local(plain["module.rows"], turned, [Shard(0), Replicate()])
    with pytest.raises(RuntimeError, match=r"'module.rows' is a DTensor on .*DeviceMesh"):
        model.load_state_dict({**state["model"], "module.rows": foreign})
    # Other placements are redistributed, as they were before wrapping.
    whole = DTensor.from_local(model.state_dict()["module.rows"].full_tensor(), mesh["tp"])
    model.module.rows.data.zero_()
    model.load_state_dict({**state["model"], "module.rows": whole})
    assert torch.equal(model.module.rows, whole.to_local()[4 * rank :][:4])
    # Parameters that are replaced are those that the model computes with.
    for values in (state["model"], plain):
        model, _ = built(2)
        model.load_state_dict(values, assign=True)
        with torch.no_grad():
            y = model(torch.randn(4, 5, generator=torch.Generator().manual_seed(9)))
        assert torch.equal(y, wanted[0])


@on_ranks(2)
def test_an_optimizer_with_values_of_a_shard_of_another_shape_says_so() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = DistributedDataParallel(_build(mesh), device_mesh=mesh["dp"])
    optimizer = torch.optim.Adafactor(model.parameters())
    backward(model, 0, 0)
    optimizer.step()
    with pytest.warns(RuntimeWarning, match="col_var, row_var have other shapes"):
        optimizer.state_dict()
