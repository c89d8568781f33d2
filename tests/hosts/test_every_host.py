"""Every host runs or refuses a scheme as the page says, gives the bits of its kind, and saves."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate as composable
from torch.distributed._composable.replicate_with_fsdp import replicate as on_fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import commhooks
from commhooks import Scheme
from commhooks.core._scheme import slots_of
from commhooks.verify._judge import error_bound_of
from tests.hosts import host_matrix
from tests.hosts.every_host import (
    MODELS,
    NAMELESS,
    SHARD_CALLS,
    SHARDS,
    WHOLE_CALLS,
    WRAPS,
    Call,
    Elsewhere,
)
from tests.tools.harness import run_ranks
from tests.tools.training import mlp, train

AVG, SUM = dist.ReduceOp.AVG, dist.ReduceOp.SUM
QUIET = (".*FSDP", ".*deprecated", ".*NO_SHARD", ".*TypedStorage")

# ---- runs, or refuses

# Of each mechanism one host at every run; the others before a release.
QUICK = {
    *("FSDP2", "HSDP, between nodes", "`process_group`", "`ZeroOptimizer`"),
    "`gather_parameters` (FSDP2)",
}
HOSTS = [
    pytest.param(host, marks=[] if host in QUICK else [pytest.mark.slow])
    for host in host_matrix.HOSTS
]


@pytest.mark.parametrize("host", HOSTS)
def test_a_host_runs_what_the_page_says(host: str) -> None:
    world_size = host_matrix.ranks_of(host)
    ranks = run_ranks(host_matrix.outcomes, world_size, host, timeout=120, ignore_warnings=(".*",))
    lines = host_matrix.PAGE.read_text(encoding="utf-8").splitlines()
    (table,) = [name for name, hosts in host_matrix.TABLES.items() if host in hosts]
    begin = lines.index(f"### {table}") + 2
    header, _, *rows = itertools.takewhile(lambda line: line.startswith("|"), lines[begin:])
    column = [cell.strip() for cell in header.split("|")].index(host)
    cells = {row.split("|")[1].strip().strip("`"): row.split("|")[column].strip() for row in rows}
    reasons = [line for line in lines if line[:1].isdigit()]
    for name, text in ranks[0].items():
        assert all(bool(texts[name]) == bool(text) for texts in ranks), (name, text)
        if not text:
            assert cells[name] == "✓", name
            continue
        key = host_matrix.reason_of(text)
        assert key, f"{name}: {text}"
        assert host_matrix.REASONS[key][1] in reasons[int(cells[name]) - 1]
    assert cells.keys() == ranks[0].keys()


# ---- the bits of its kind

SHAPE, STEPS = (32, 64), 2  # rows of a weight in two shards, without padding
SCHEMES: dict[str, Scheme] = {
    "none": commhooks.make("none"),
    "none, in memory of its own": Elsewhere(),
    "bf16": commhooks.make("bf16"),
    "int8": commhooks.make("int8"),
    "int8, to nearest": commhooks.make("int8", rounding="nearest", error_feedback=False),
    "topk": commhooks.make("topk", ratio=0.1),
    "powersgd": commhooks.make("powersgd", rank=2),
}

Means = dict[str, list[Tensor]]  # gradients of each step, by host


def given(step: int, rank: int, shape: tuple[int, int] = SHAPE) -> Tensor:
    """Returns the gradient of the weight."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 * step + rank))


def gradient(step: int, rank: int, shape: tuple[int, int] = SHAPE, bias: bool = False) -> Tensor:
    """Returns what autograd gives on a rank, flat."""
    weight = given(step, rank, shape)
    return torch.cat([weight.view(-1), weight.sum(1)]) if bias else weight.view(-1)


def reduced(model: nn.Module, rank: int, shape: tuple[int, int] = SHAPE) -> list[Tensor]:
    """Returns the gradients of each step: whole, or this rank's shards."""
    means = []
    for step in range(STEPS):
        model.zero_grad()
        (model(torch.eye(shape[1])).t() * given(step, rank, shape)).sum().backward()
        means.append(_flat(model))
    return means


def _flat(model: nn.Module) -> Tensor:
    """Returns the gradients that this rank has, one after the other."""
    grads: list[Any] = [parameter.grad for parameter in model.parameters()]
    local = [grad.to_local() if hasattr(grad, "to_local") else grad for grad in grads]
    # FSDP1 leaves a parameter without a gradient whose shard is on the other rank.
    return torch.cat([grad.detach().reshape(-1) for grad in local if grad is not None])


def called(call: Call, rank: int, *, shards: int) -> list[Tensor]:
    means = []
    for step in range(STEPS):
        tensor = given(step, rank).view(-1) if shards > 1 else given(step, rank)
        into = tensor if shards == 1 else torch.empty(tensor.numel() // shards)
        call(tensor, into)
        means.append(into.reshape(-1))
    return means


# Random bits are keyed by names: that of the parameter, in FSDP2 that of its first piece
# ("weight#0"), without one that of the call. So these draw others than the first of their kind.
DRAW_OTHERS = {*NAMELESS, "FSDP1", "`Collectives.reduce_scatter`"}
RANDOM = {"int8"}
# An all-reduce of codes rounds the mean, too; a shard has the largest entries of its own.
DIFFERENT_HALVES = {"int8", "int8, to nearest", "topk"}


def run_on(scheme: Scheme, host: str) -> bool:
    """Returns whether a host takes a scheme."""
    if slots_of(scheme) and host in NAMELESS:
        return False
    return scheme.traits.shards or host not in SHARDS | SHARD_CALLS


def _all_hosts(scheme: Scheme, rank: int, world_size: int) -> Means:
    means = {}
    for name, host in MODELS.items():
        if run_on(scheme, name):
            means[name] = reduced(host(scheme, nn.Linear(*SHAPE[::-1], bias=False)), rank)
    for name, call in {**WHOLE_CALLS, **SHARD_CALLS}.items():
        if run_on(scheme, name):
            shards = 1 if name in WHOLE_CALLS else world_size
            means[name] = called(call(scheme, AVG), rank, shards=shards)
    return means


def check_law(scheme: Scheme, mean: Tensor, exact: Tensor, size: float, host: str) -> None:
    """The error is within what the scheme declares, of the larger gradient of both ranks."""
    law = error_bound_of(scheme, 2)
    assert law.rounding is not None
    assert (mean - exact).norm() <= (law.rounding + law.variance**0.5) * size, host


def check_one_layout(name: str, ranks: Sequence[Means]) -> None:
    """Hosts of one layout give the same bits."""
    scheme = SCHEMES[name]
    both = [[gradient(step, rank) for rank in range(2)] for step in range(STEPS)]
    dense = [(first + second) / 2 for first, second in both]
    sizes = [max(float(first.norm()), float(second.norm())) for first, second in both]
    for rank, of_hosts in enumerate(ranks):
        wholes, shards = of_hosts["torch's DDP"], of_hosts.get("FSDP2")
        parts = [whole.chunk(2)[rank] for whole in wholes]
        for host, means in of_hosts.items():
            sharded = host in SHARDS or host in SHARD_CALLS
            if name in RANDOM and host in DRAW_OTHERS:
                for mean, exact, size in zip(means, dense, sizes, strict=True):
                    check_law(scheme, mean, exact.chunk(2)[rank] if sharded else exact, size, host)
            else:
                wanted = shards if sharded else wholes
                assert wanted is not None
                assert all(map(torch.equal, means, wanted)), (name, host)
        if shards is not None:
            assert all(map(torch.equal, shards, parts)) == (name not in DIFFERENT_HALVES), name
        assert any(map(torch.equal, wholes, dense)) == name.startswith("none"), name


# A bias and an odd number of rows, which hosts lay out and fill up each in its own way.
ODD = (33, 64)
CUT = 17 * ODD[1]  # entries of the weight in FSDP2's first shard
# Each entry by itself, or each matrix.
WHATEVER_LAYOUT = ("none", "none, in memory of its own", "bf16", "powersgd")


def _odd(scheme: Scheme, rank: int) -> Means:
    return {
        name: reduced(host(scheme, nn.Linear(*ODD[::-1])), rank, ODD)
        for name, host in MODELS.items()
        if run_on(scheme, name)
    }


def whole(host: str, first: Tensor, second: Tensor) -> Tensor:
    """Returns the gradient, of what both ranks have."""
    if host not in SHARDS:
        assert torch.equal(first, second)
        return first
    if host == "FSDP1":  # one flat tensor, cut anywhere
        return torch.cat([first, second])
    rest = ODD[0] * ODD[1] - CUT
    return torch.cat([first[:CUT], second[:rest], first[CUT:], second[rest:]])


def check_other_layouts(name: str, ranks: Sequence[Means]) -> None:
    """Hosts of other layouts have the error of the scheme."""
    scheme = SCHEMES[name]
    for step in range(STEPS):
        first, second = (gradient(step, rank, ODD, bias=True) for rank in range(2))
        wanted, size = (first + second) / 2, max(float(first.norm()), float(second.norm()))
        means = {host: whole(host, *(rank[host][step] for rank in ranks)) for host in ranks[0]}
        for host, mean in means.items():
            if name in WHATEVER_LAYOUT:
                assert torch.equal(mean, means["torch's DDP"]), (name, host, step)
            else:
                check_law(scheme, mean, wanted, size, host)


# All in one start of the ranks, which takes as long as the steps of one scheme.
def _by_schemes(rank: int, world_size: int) -> dict[str, tuple[Means, Means]]:
    odd = {*WHATEVER_LAYOUT, "int8"}
    return {
        name: (_all_hosts(scheme, rank, world_size), _odd(scheme, rank) if name in odd else {})
        for name, scheme in SCHEMES.items()
    }


def test_hosts_of_one_layout_give_the_same_bits_and_others_have_the_error_of_the_scheme() -> None:
    quiet = (*QUIET, "Blockwise is biased")  # its error is compared, so it has no feedback
    ranks = run_ranks(_by_schemes, 2, ignore_warnings=quiet)
    for name in SCHEMES:
        alike, odd = zip(*(of_rank[name] for of_rank in ranks), strict=True)
        check_one_layout(name, alike)
        check_other_layouts(name, odd)


# ---- without a scheme: the bits of the host itself

trained = partial(train, steps=range(STEPS), width=32)


def _models(rank: int, world_size: int) -> dict[str, list[list[Tensor]]]:
    """Returns gradients of each host with "none", and by itself."""
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("replicate",))
    none, results = commhooks.make("none"), {}
    for host in (*WRAPS, "`fsdp.replicate` (FSDP2)"):
        plain = mlp(32, 4)
        if host in WRAPS:
            plain = WRAPS[host](plain)
        else:
            for module in (plain[0], plain):  # type: ignore[index]
                on_fsdp(module, mesh=mesh)
        models = MODELS[host](none, mlp(32, 4)), plain
        results[host] = [trained(model, rank) for model in models]
    ours, plain = (composable(mlp(32, 4), bucket_cap_mb=0.004) for _ in range(2))
    commhooks.register(ours, none)
    results["`replicate()`, composable"] = [trained(model, rank) for model in (ours, plain)]
    group = commhooks.process_group(none, least=1)
    grouped, plain = (
        DistributedDataParallel(mlp(32, 4), process_group=over, bucket_cap_mb=0.004)
        for over in (group, None)
    )
    results["`process_group`"] = [trained(model, rank) for model in (grouped, plain)]
    assert group.hook.ledger.dense_bytes > 0
    return results


def _calls(rank: int, world_size: int) -> dict[str, list[Tensor]]:
    """Returns what torch's function gives, and what calls with "none" give."""
    inputs = torch.randn(world_size * 500, generator=torch.Generator().manual_seed(rank))
    none, results = commhooks.make("none"), {}
    for name, op in (("sum", SUM), ("mean", AVG)):
        dist.all_reduce(torchs := inputs.clone(), op)
        dist.reduce_scatter_tensor(part := torch.empty(500), inputs, op)
        results[name], results[f"{name} of a part"] = [torchs], [part]
        for call in WHOLE_CALLS.values():
            call(none, op)(ours := inputs.clone(), ours)
            results[name].append(ours)
        for call in SHARD_CALLS.values():
            call(none, op)(inputs, ours := torch.empty(500))
            results[f"{name} of a part"].append(ours)
    return results


def near(left: Tensor, right: Tensor) -> bool:
    """Returns whether two tensors differ by a few roundings at the most."""
    return float((left - right).norm()) < 4 * 2**-24 * float(right.norm())


# Gloo divides after the sum, as FSDP2's all-reduce and ``ReduceOp.AVG`` ask it to, and FSDP1, too,
# but for a power of two. With "none" each rank multiplies by 1/n before the sum, as
# DistributedDataParallel does, unless it gets a part only. Powers of two are exact.
DIVIDES_LATER = {"`fsdp.replicate` (FSDP2)", "mean", "FSDP1, `NO_SHARD`"}


def _without_a_scheme(rank: int, world_size: int) -> Any:
    return _models(rank, world_size), _calls(rank, world_size)


@pytest.mark.parametrize("ranks", [2, 3])
def test_without_a_scheme_hosts_and_calls_give_their_own_bits(ranks: int) -> None:
    for models, calls in run_ranks(_without_a_scheme, ranks, ignore_warnings=QUIET):
        for host, (ours, plain) in models.items():
            same = near if host in DIVIDES_LATER and ranks == 3 else torch.equal
            assert all(map(same, ours, plain)), host
        for call, (wanted, *others) in calls.items():
            same = near if call in DIVIDES_LATER and ranks == 3 else torch.equal
            assert all(same(result, wanted) for result in others), call
