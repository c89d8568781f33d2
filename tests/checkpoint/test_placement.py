"""Saved states say which piece of the model they are of, beside tensor parallelism."""

from __future__ import annotations

import copy
import pickle
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import commhooks
from commhooks.checkpoint._placement import shard_description
from commhooks.core._names import is_padding, parameter_name
from commhooks.errors import CheckpointError, MismatchError
from commhooks.hook._engine import replicated_parameters
from commhooks.wrappers import EF21, AveragedFeedback, DelayedStart, PeriodicDense
from ddp_core import DistributedDataParallel
from tests.fsdp.test_fsdp2 import backward, model_of, sharded
from tests.shelf import BUILT_IN
from tests.tools.harness import on_ranks, run_ranks
from tests.tools.training import everyone, same, sealed

PLAN: dict[str, Any] = {"0": ColwiseParallel(), "2": RowwiseParallel()}
# What all ranks of the other dimension have alike, the bias of the second layer, is not cut.
PIECES = [
    ["piece {} of 2 along dimension 0", "0.weight", "0.bias"],
    ["piece {} of 2 along dimension 1", "2.weight"],
]
QUIET = (
    *(".*TypedStorage", ".*returned a view tensor", ".*tensor parallelism have in common"),
    *(".*FSDP", ".*deprecated"),
)


def _hook_on(host: str, mesh: Any) -> tuple[nn.Module, commhooks.HookState]:
    model: nn.Module = parallelize_module(model_of((33, 64, 7)), mesh["tp"], PLAN)
    if host == "fsdp2":
        model = sharded(model, mesh["dp"])
        return model, commhooks.register(model, "int4", block=64)
    if host == "fsdp1":
        cpu = torch.device("cpu")
        model = FullyShardedDataParallel(model, device_mesh=mesh["dp"], device_id=cpu)
        return model, commhooks.register(model, "int4", block=64)
    kind = TorchDDP if host == "torch" else DistributedDataParallel
    model = kind(model, device_mesh=mesh["dp"])
    return model, commhooks.register(model, "topk", ratio=0.1)


def _residuals(hook: commhooks.HookState) -> dict[str, Tensor]:
    part = hook.state_dict()[f"rank{dist.get_rank()}"]
    return dict(part["memory"]["residual"])


def _columns(rank: int, world_size: int, host: str, folder: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    replica, column = rank // 2, rank % 2
    model, hook = _hook_on(host, mesh)
    for step in range(2):
        backward(model, step, replica)
    kept, local = _residuals(hook), hook.state_dict()
    placement = [[piece.format(column), *names] for piece, *names in PIECES]
    assert local[f"rank{rank}"]["placement"] == placement
    gathered = hook.state_dict(gather=True)
    assert [gathered[f"rank{value}"]["placement"] for value in (column, column + 2)] == [
        placement
    ] * 2
    every, wholes = everyone(local), everyone(gathered)
    dcp.save({"hook": hook}, checkpoint_id=folder)

    _, again = _hook_on(host, mesh)
    wrong = rf"of '0.weight' it has piece {1 - column} of 2 .* this rank trains piece {column} of 2"
    for foreign_state in (every[rank ^ 1], wholes[rank ^ 1]):
        with pytest.raises(CheckpointError, match=wrong):
            again.load_state_dict(foreign_state)
    assert again.step == 0
    for state in (local, gathered, every, wholes[:2]):
        _, again = _hook_on(host, mesh)
        again.load_state_dict(state)
        assert same(_residuals(again), kept)
    dcp.load({"hook": (again := _hook_on(host, mesh)[1])}, checkpoint_id=folder)
    assert same(_residuals(again), kept)

    # Without a placement it is of whole parameters; earlier releases did not say, and took it.
    whole = copy.deepcopy(every[rank ^ 1])
    del whole[f"rank{rank ^ 1}"]["placement"]
    wrong = rf"of '0.weight' it has all of it, and this rank trains piece {column} of 2"
    with pytest.raises(CheckpointError, match=wrong):
        again.load_state_dict(sealed(whole))
    again.load_state_dict(sealed({**whole, "version": 2}))

    if host == "fsdp2":  # bytes are of a rank's pieces, and go by the names of these
        packed = AveragedFeedback(commhooks.make("int4", error_feedback=False))
        model = sharded(parallelize_module(model_of((33, 64, 7)), mesh["tp"], PLAN), mesh["dp"])
        hook = commhooks.register(model, packed)
        backward(model, 0, replica)
        rank_states = everyone(hook.state_dict())
        wrong = rf"it has piece {1 - column} of 2 .* this rank trains piece {column} of 2"
        with pytest.raises(CheckpointError, match=wrong):
            hook.load_state_dict(rank_states[rank ^ 1])
        hook.load_state_dict(rank_states[rank])

    # The same columns on other ranks: (tp, dp) is (rank // 2, rank % 2) now.
    turned = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))
    wanted = everyone(kept)[2 * (rank % 2) + rank // 2]
    for load in (
        lambda hook: hook.load_state_dict(every),
        lambda hook: commhooks.load_dcp(hook, folder),
    ):
        _, again = _hook_on(host, turned)
        load(again)
        assert same(_residuals(again), wanted)


# In processes of their own: torch keeps the meshes of DTensors, whose groups end with a test.
@pytest.mark.parametrize("host", ["ddp_core", "fsdp2", "fsdp1"])
def test_residuals_of_another_column_are_refused_and_those_of_the_own_are_found(
    host: str, tmp_path: Path
) -> None:
    run_ranks(_columns, 4, host, str(tmp_path), ignore_warnings=QUIET)


@on_ranks(2, ignore_warnings=QUIET)
def test_the_shards_that_torch_has_made_are_known_too(rank: int) -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    _, hook = _hook_on("torch", mesh)
    placement = [[piece.format(rank), *names] for piece, *names in PIECES]
    state = hook.state_dict()
    assert state[f"rank{rank}"]["placement"] == placement
    hook.call_monitor.suppressed = True

    uncut = commhooks.register(TorchDDP(model_of((33, 64, 7))), "topk", ratio=0.1)
    with pytest.raises(CheckpointError, match=r"it has piece .* this rank trains all of it"):
        uncut.load_state_dict(state)
    uncut.call_monitor.suppressed = True


def _train_unpickled(mesh: Any, state: Any, refused: bool) -> None:
    model = parallelize_module(model_of((33, 64, 7)), mesh["tp"], PLAN)
    model = DistributedDataParallel(model, device_mesh=mesh["dp"])
    model.register_comm_hook(state, commhooks.comm_hook)
    if not refused:
        backward(model, 1, 0)
        return
    with pytest.raises(CheckpointError, match=r"trained piece . of 2 along dimension 0 of '0\."):
        backward(model, 1, 0)


@on_ranks(2, ignore_warnings=QUIET)
def test_a_pickle_of_another_column_is_refused(rank: int) -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model, hook = _hook_on("ddp_core", mesh)
    backward(model, 0, 0)
    every = everyone(pickle.dumps(hook))
    # A copy that has not met its model yet still is of the rank that it came from.
    again = pickle.dumps(pickle.loads(every[rank ^ 1]))
    looked_up = pickle.loads(every[rank ^ 1])
    looked_up.state_dict()  # looks up which rank this is
    looked_up = pickle.dumps(looked_up)
    assert pickle.loads(looked_up).target.pickled_on == pickle.loads(again).target.pickled_on
    old = pickle.loads(every[rank ^ 1])
    old.target.pickled_on = old.target.pickled_on._replace(placement=None)
    older = pickle.loads(pickle.dumps(old))
    foreign_states = (every[rank ^ 1], again, looked_up)
    for state, refused in (*((value, True) for value in foreign_states), (every[rank], False)):
        _train_unpickled(mesh, pickle.loads(state), refused)
    for state in (old, older):  # earlier releases did not say
        _train_unpickled(mesh, state, False)


def _piece(*cuts: tuple[Any, int, int]) -> str:
    """A piece by the placement, the number of ranks and the rank of each dimension of a mesh."""
    placements, sizes, ranks = zip(*cuts, strict=True)
    mesh = SimpleNamespace(shape=sizes, get_coordinate=lambda: ranks)
    return shard_description(SimpleNamespace(placements=placements, mesh=mesh))


def test_pieces_are_named_alike_on_turned_meshes() -> None:
    first, second, whole = (Shard(0), 2, 1), (Shard(1), 3, 2), (Replicate(), 4, 3)
    text = "piece 1 of 2 along dimension 0, piece 2 of 3 along dimension 1"
    assert _piece(first, second) == _piece(second, whole, first) == text
    # Rows that are apart from each other, as where another dimension of the mesh cuts first.
    apart = (_StridedShard(0, split_factor=3), 2, 1)
    assert _piece(apart) == "piece 1 of 2 along dimension 0 in steps of 3"
    # One dimension that is cut twice: the second cut is within the piece of the first.
    other = (Shard(0), 3, 2)
    assert _piece(first, other) != _piece(other, first)
    assert _piece(other, (Shard(1), 2, 0), first) == _piece((Shard(1), 2, 0), other, first)


@on_ranks(2, ignore_warnings=QUIET)
def test_a_mean_over_other_pieces_is_refused(world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
    model = parallelize_module(model_of((33, 64, 7)), mesh, PLAN)
    with pytest.raises(MismatchError, match=r"0\.weight .* piece 0 of 2 .* piece 1 of 2"):
        commhooks.register(DistributedDataParallel(model), "none")


@on_ranks(4, ignore_warnings=QUIET)
def test_a_mean_between_columns_is_refused_and_padding_is_no_parameter(rank: int) -> None:
    names = ("replicate", "shard", "tp")
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=names)
    model: nn.Module = parallelize_module(model_of((33, 64, 7)), mesh["tp"], PLAN)
    model = sharded(model, mesh["shard"])
    with pytest.raises(MismatchError, match=r"0\.weight#. .* piece 0 of 2 .* piece 1 of 2"):
        commhooks.register(model, "none", replicate_group=mesh["tp"])
    # Padding is no parameter: where tensor parallelism cuts everything, nothing else travels.
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole: Any = parallelize_module(model_of((33, 64, 7)), mesh["tp"], PLAN)
    whole[2].bias = None
    cpu = torch.device("cpu")
    padded = FullyShardedDataParallel(whole, device_mesh=mesh["dp"], device_id=cpu)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*tensor parallelism have in common")
        hook = commhooks.register(padded, "signsgd")
        hook.switch("int4")
    assert any(map(is_padding, hook.parameters.shapes))
    assert not replicated_parameters(hook.scheme, hook.parameters)
    backward(padded, 0, rank // 2)


@on_ranks(2, ignore_warnings=QUIET)
def test_states_without_memory_load_on_any_piece(tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))

    def hooked() -> tuple[nn.Module, commhooks.HookState]:
        model = parallelize_module(model_of((33, 64, 7)), mesh["tp"], PLAN)
        model = DistributedDataParallel(model, device_mesh=mesh["dp"])
        return model, commhooks.register(model, "int8")

    model, hook = hooked()
    for step in range(2):
        backward(model, step, 0)
    dcp.save({"hook": hook}, checkpoint_id=tmp_path)
    for gathered in everyone(hook.state_dict(gather=True)):
        _, again = hooked()
        again.load_state_dict(gathered)
        assert again.step == 2
    _, again = hooked()
    commhooks.load_dcp(again, str(tmp_path))
    assert again.step == 2


def _stay_equal(rank: int, world_size: int, host: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    columns = mesh["tp"].get_group()
    kind = {"torch": TorchDDP, "ddp_core": DistributedDataParallel}.get(host)
    rules = commhooks.PerParameter(
        [commhooks.Rule(commhooks.make("topk"), name="2.*")], commhooks.make("int4")
    )
    onebit = commhooks.make("onebit", block=64)
    wrapped: dict[str, commhooks.Scheme] = {
        "per parameter": rules,
        "rules with feedback": commhooks.PerParameter([commhooks.Rule(onebit, name="*")], onebit),
        "delayed": DelayedStart(onebit, 1),
        "now and then dense": PeriodicDense(onebit, 3),
        "differences": EF21(commhooks.make("topk", ratio=0.1, error_feedback=False)),
    }
    options_of = {"bf16 with feedback": {"error_feedback": True}}
    for name in [*BUILT_IN, "switched", *wrapped, *options_of]:
        model: nn.Module = parallelize_module(model_of((33, 64, 7)), mesh["tp"], PLAN)
        model = sharded(model, mesh["dp"]) if kind is None else kind(model, device_mesh=mesh["dp"])
        given: Any = wrapped.get(name, "none" if name == "switched" else name.split()[0])
        options = options_of.get(name, {})
        scheme = given if name in wrapped else commhooks.make(given, **options)
        if kind is None and not scheme.traits.shards:
            continue
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            hook = commhooks.register(
                model, given, verify=commhooks.Verification(2, "raise"), **options
            )
            if name == "switched":
                hook.switch("int4")
        ours = [warning for warning in caught if "have in common" in str(warning.message)]
        assert all(outcome.filename == __file__ for outcome in ours)
        words = [str(outcome.message) for outcome in ours]
        messages = bool(words)
        assert all("of 2.bias (1 parameters" in word for word in words), words  # no pieces of it
        exactly = set() if messages else replicated_parameters(hook.scheme, hook.parameters)
        assert {parameter_name(element) for element in exactly} <= {"2.bias"}, name
        assert messages == (hook.scheme.traits.returns == "update" and name != "gossip"), name
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for step in range(3):
            optimizer.zero_grad()
            backward(model, step, rank // 2)
            optimizer.step()
        # By the optimizer: torch's class leaves the model's own list empty after a forward pass.
        bias = optimizer.param_groups[0]["params"][-1]
        for value in (bias.grad, bias.detach()):
            value = value.to_local() if isinstance(value, DTensor) else value
            columns_have = [torch.empty_like(value) for _ in range(2)]
            dist.all_gather(columns_have, value, group=columns)
            assert messages or torch.equal(*columns_have), (name, columns_have)


@pytest.mark.slow
@pytest.mark.parametrize("host", ["ddp_core", "torch", "fsdp2"])
def test_parameters_that_are_not_cut_stay_equal_over_the_ranks_of_tensor_parallelism(
    host: str,
) -> None:
    """No scheme rounds what columns have in common, whatever lies beside it."""
    run_ranks(_stay_equal, 4, host, ignore_warnings=QUIET)


@on_ranks(2, ignore_warnings=QUIET)
def test_what_is_not_cut_says_nothing_and_loads_anywhere(rank: int) -> None:
    """A dimension of one rank cuts nothing, nor is there anything to say without DTensors."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    _, alone = _hook_on("ddp_core", mesh)
    model = DistributedDataParallel(model_of((33, 64, 7)))
    plain = commhooks.register(model, "topk", ratio=0.1)
    backward(model, 0, rank)
    state = plain.state_dict(gather=True)
    fields = {"rank", "global_rank", "leader", "arrival", "memory", "checksum"}
    assert state["rank0"].keys() == fields
    alone.load_state_dict(state)
    plain.load_state_dict(alone.state_dict(gather=True))
    assert "placement" not in alone.state_dict()[f"rank{rank}"]


@on_ranks(2, ignore_warnings=QUIET)
def test_optimizers_of_shards_refuse_those_of_another_column(rank: int) -> None:
    """A sharded or an outer optimizer saves shards, too, and takes those of its own columns."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))

    def model() -> nn.Module:
        cut = parallelize_module(model_of((33, 64, 7)), mesh["tp"], PLAN)
        return DistributedDataParallel(cut, device_mesh=mesh["dp"])

    def zero() -> Any:
        return commhooks.ZeroOptimizer(model(), torch.optim.AdamW, lr=0.1)

    def diloco() -> Any:
        local = model()
        commhooks.register(local, "noop").call_monitor.suppressed = True
        return commhooks.DiLoCo(local, every=1, process_group=mesh["dp"].get_group())

    for build in (zero, diloco):
        value, other = build(), build()
        state = value.state_dict()
        foreign_state = everyone(state)[rank ^ 1]
        wrong = rf"of '0.weight' it has piece {1 - rank} of 2 .* this rank trains piece {rank} of 2"
        with pytest.raises(CheckpointError, match=wrong):
            other.load_state_dict(foreign_state)
        other.load_state_dict(state)
    with pytest.raises(ValueError, match=r"0\.weight is a DTensor.* register \"noop\" on it"):
        commhooks.DiLoCo(parallelize_module(model_of((33, 64, 7)), mesh["tp"], PLAN))
