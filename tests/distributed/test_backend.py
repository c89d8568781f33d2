""" "commhooks" as the name of a backend of torch.distributed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate as on_fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import commhooks
from commhooks.hosts import SchemeGroup
from tests.distributed.harness import run_ranks
from tests.distributed.training import batch, equal_bits, gradients, local_means, mlp, outcome

STEPS = 4
SMALL = {"bucket_cap_mb": 0.004}  # several buckets


def train(model: nn.Module, rank: int, steps: int = STEPS, first: int = 0) -> list[Tensor]:
    """Gradients of each step."""
    means = []
    for step in range(first, first + steps):
        model.zero_grad()
        model(batch(step, rank, 8, 32)).square().sum().backward()
        means.append(gradients(model))
    return means


def wrapped(group: Any = None) -> DistributedDataParallel:
    return DistributedDataParallel(mlp(32, 4), process_group=group, **SMALL)


def near(ours: list[Tensor], dense: list[Tensor], allowed: float = 0.04) -> bool:
    pairs = zip(ours, dense, strict=True)
    return all(0 < float((one - two).norm() / two.norm()) < allowed for one, two in pairs)


def summed(tensor: Tensor, group: Any = None, op: Any = dist.ReduceOp.SUM) -> Tensor:
    total = tensor.clone()
    dist.all_reduce(total, op, group=group)
    return total


def begin_again(rank: int, world_size: int, **options: Any) -> None:
    """Makes the default group anew, of the backend "commhooks"."""
    store = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    dist.init_process_group(
        "commhooks",
        store=dist.PrefixStore("again", store),
        rank=rank,
        world_size=world_size,
        **options,
    )


# ---- new_group


def _new_group(rank: int, world_size: int) -> dict[str, Any]:
    commhooks.register_backend("int8", rounding="nearest", error_feedback=False)
    group = dist.new_group(backend="commhooks")
    found: dict[str, Any] = {
        "class": isinstance(group, SchemeGroup),
        "backend": dist.get_backend(group) == "commhooks",
        "ranks": dist.get_process_group_ranks(group) == list(range(world_size)),
    }
    dense, ours = train(wrapped(), rank), train(wrapped(group), rank)
    found["near"] = near(ours, dense)
    found["bytes"] = group.hook.ledger.wire_bytes < 0.6 * group.hook.ledger.dense_bytes
    if world_size == 2:
        model = wrapped()
        commhooks.register(model, "int8", rounding="nearest", error_feedback=False)
        found["near a hook"] = near(ours, train(model, rank))

    x = torch.randn(5000, generator=torch.Generator().manual_seed(rank))
    of_its_own = {
        "name": "fp16",
        "scheme": commhooks.make("eden"),
        "dict": {"scheme": "int8", "least": 6000},
    }
    for kind, options in of_its_own.items():
        other = dist.new_group(backend="commhooks", pg_options=options)
        error = float((summed(x, other) - summed(x)).norm())
        found[kind] = error == 0 if kind == "dict" else error > 0
        dist.destroy_process_group(other)

    flag = torch.tensor([float(rank)])
    dist.broadcast(flag, world_size - 1, group=group)
    everyone: list[Any] = [None] * world_size
    dist.all_gather_object(everyone, rank, group=group)
    dist.barrier(group=group)
    found["passes"] = flag.item() == world_size - 1 and everyone == list(range(world_size))
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_new_group_of_the_backend_compresses_for_a_model_without_a_hook(ranks: int) -> None:
    for found in run_ranks(_new_group, ranks):
        assert all(found.values()), found


def _parts(rank: int, world_size: int) -> list[Any]:
    """Groups of some ranks, made and destroyed; all ranks call new_group, as torch wants it."""
    commhooks.register_backend("int8")
    sums = []
    for _ in range(3):
        pair, single = (dist.new_group(ranks, backend="commhooks") for ranks in ([0, 2], [1]))
        group = single if rank == 1 else pair
        sums.append(round(float(summed(torch.full((2000,), rank + 1.0), group).mean()), 1))
        dist.destroy_process_group(group)
    alone = dist.new_group([1, 2], backend="commhooks", use_local_synchronization=True)
    if rank:
        sums.append([*sorted(key for key in alone.hook.state_dict() if key.startswith("rank"))])
    return sums


def test_groups_of_some_ranks_and_their_states_are_named_by_the_rank_in_the_job() -> None:
    assert run_ranks(_parts, 3) == [
        [4.0] * 3,
        [2.0] * 3 + [["rank1"]],
        [4.0] * 3 + [["rank2"]],
    ]


# ---- the default group


def _default_group(rank: int, world_size: int) -> dict[str, Any]:
    dense = train(wrapped(), rank)
    x = torch.randn(5000, generator=torch.Generator().manual_seed(rank))
    total = summed(x)
    commhooks.register_backend("int8")
    begin_again(rank, world_size)
    world = dist.group.WORLD
    found: dict[str, Any] = {
        "backend": dist.get_backend() == "commhooks",
        "model": near(train(wrapped(), rank), dense),
        "sum": 0 < float((summed(x) - total).norm() / total.norm()) < 0.02,
        "small": torch.equal(summed(x[:1000]), total[:1000]),
        "mesh": init_device_mesh("cpu", (world_size,)).get_group() is world,
        "subgroup": isinstance(dist.new_group([0, 1]), SchemeGroup),
        "plain": torch.equal(summed(x, dist.new_group(backend="gloo")), total),
        # A hook or a function on it has a scheme of its own, which runs alone.
        "twice": outcome(commhooks.register, wrapped(), "int8"),
        "function": torch.equal(_reduced(x, "none"), total),
        "collectives": commhooks.Collectives("topk", ratio=0.1)._binding.group() is world.inside,
    }
    model = mlp(32, 4)
    mesh = init_device_mesh("cpu", (world_size,))
    for module in (model[0], model[2], model):
        on_fsdp(module, mesh=mesh)
    found["replicate"] = near(local_means(model, rank, STEPS), dense)
    calls = dist.group.WORLD.hook.calls
    model = mlp(32, 4)
    fully_shard(model, mesh=mesh)
    local_means(model, rank, STEPS)
    found["fully_shard by the scheme"] = dist.group.WORLD.hook.calls > calls
    model = mlp(32, 4)
    fully_shard(model, mesh=mesh)
    commhooks.register(model, "none")
    train_sharded = local_means(model, rank, STEPS)
    found["fully_shard"] = bool(train_sharded)

    begin_again(rank, world_size, pg_options="fp8")
    found["another"] = 0 < float((summed(x) - total).norm() / total.norm()) < 0.1
    return found


def _reduced(x: Tensor, scheme: str) -> Tensor:
    total = x.clone()
    commhooks.all_reduce(total, scheme)
    return total


def test_the_default_group_may_be_of_the_backend() -> None:
    ignored = (".*is deprecated.*",)
    for found in run_ranks(_default_group, 2, ignore_warnings=ignored, timeout=100):
        kind, text = found.pop("twice")
        assert kind == "RegistrationError"
        assert "that it was made of" in text
        assert all(found.values()), found


def _mesh(rank: int, world_size: int) -> dict[str, Any]:
    commhooks.register_backend("int8")
    mesh = init_device_mesh(
        "cpu",
        (2, 2),
        mesh_dim_names=("data", "tensor"),
        backend_override={"data": "commhooks"},
    )
    data, tensor = mesh["data"].get_group(), mesh["tensor"].get_group()
    means = train(wrapped(data), rank)
    everyone: list[Any] = [None] * world_size
    dist.all_gather_object(everyone, means[-1])
    return {
        "backends": (dist.get_backend(data), dist.get_backend(tensor)) == ("commhooks", "gloo"),
        "compressed": data.hook.calls > 0,
        "equal": equal_bits([everyone[rank % 2], everyone[rank % 2 + 2]]),
        "apart": not torch.equal(everyone[0], everyone[1]),
    }


def test_one_dimension_of_a_mesh_may_be_of_the_backend() -> None:
    for found in run_ranks(_mesh, 4):
        assert all(found.values()), found


# ---- what is refused


def _refusals(rank: int, world_size: int) -> dict[str, Any]:
    commhooks.process_group("none")  # makes the name known, and no scheme
    found = {"none": outcome(dist.new_group, backend="commhooks")}
    asked: dict[str, Any] = {
        "options": 3,
        "unknown": "int7",
        "memory": {"scheme": "powersgd", "rank": 2},
        "argument": {"scheme": "int8", "block": 1},
        "differs": {"scheme": "int8", "least": 100 + rank},
    }
    for what, options in asked.items():
        found[what] = outcome(dist.new_group, backend="commhooks", pg_options=options)
    found["register"] = outcome(commhooks.register_backend, "int7")
    found["register memory"] = outcome(commhooks.register_backend, "topk")
    return found


EXPECTED = {
    "none": ("RegistrationError", "register_backend"),
    "options": ("RegistrationError", "pg_options is"),
    "unknown": ("UnknownSchemeError", "int8"),
    "memory": ("RegistrationError", "keeps memory by parameter"),
    "argument": ("OptionError", "block"),
    "differs": ("MismatchError", "least"),
    "register": ("UnknownSchemeError", "int8"),
    "register memory": ("RegistrationError", "commhooks.register(model, scheme)"),
}


def test_a_group_without_a_scheme_or_with_another_one_elsewhere_is_refused() -> None:
    for found in run_ranks(_refusals, 2):
        for what, (kind, text) in EXPECTED.items():
            assert found[what] is not None, what
            assert found[what][0] == kind, (what, found[what])
            assert text in found[what][1], (what, found[what])
