"""The low-rank schemes over several steps, against the formulas of the papers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from commhooks import ErrorFeedback, Simulation, make
from commhooks.schemes import PowerSGD
from tests.unit.references import all_equal, close, gradients, mean, normal, put

SHAPES = {"w": (20, 30), "bias": (20,), "conv": (12, 4, 3, 3)}
SIDES = {"w": (20, 30), "conv": (12, 36)}
NUMEL = 600 + 20 + 432
# float32, and the next step starts from this one's factors: errors grow by the ratio of singular
# values, about ten, a step.
NEAR = 2e-4


def orthonormal(columns: Tensor) -> Tensor:
    return torch.linalg.qr(columns).Q


def parts_of(flat: Tensor) -> dict[str, Tensor]:
    w, bias, conv = flat.double().split([600, 20, 432])
    return {"w": w.view(20, 30), "bias": bias, "conv": conv.view(12, 36)}


def flat_of(parts: dict[str, Tensor]) -> Tensor:
    return torch.cat([parts[name].flatten() for name in ("w", "bias", "conv")])


def factors(rank: int, side: int) -> dict[str, Tensor]:
    """A factor to start from: rows are columns of Q."""
    return {
        name: normal(rank * sides[side], 77, side).view(rank, -1) for name, sides in SIDES.items()
    }


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize("feedback", [False, True])
def test_powersgd(world_size: int, rank: int, feedback: bool) -> None:
    scheme = PowerSGD(rank, min_compression_rate=1.0)
    scheme = ErrorFeedback(scheme) if feedback else scheme
    ranks = Simulation(scheme, SHAPES, world_size=world_size)
    start = factors(rank, 1)
    put(ranks, "powersgd.q", start)
    q = {name: value.double().T for name, value in start.items()}
    e = [torch.zeros(NUMEL, dtype=torch.float64) for _ in range(world_size)]
    for step in range(4):
        grads = gradients(world_size, step, NUMEL)
        c = [parts_of(g + own) for g, own in zip(grads, e, strict=True)]
        arrived = {"bias": mean([one["bias"] for one in c])}
        sent = [{"bias": one["bias"]} for one in c]
        for name in SIDES:
            p = orthonormal(mean([one[name] @ q[name] for one in c]))
            own = [one[name].T @ p for one in c]
            q[name] = mean(own)
            arrived[name] = p @ q[name].T
            for share, factor in zip(sent, own, strict=True):
                share[name] = p @ factor.T
        close(all_equal(ranks.step(grads)), flat_of(arrived), NEAR)
        if feedback:
            e = [flat_of(one) - flat_of(share) for one, share in zip(c, sent, strict=True)]
            for index, own_residual in enumerate(e):
                close(ranks.memory(index), own_residual, NEAR)


@pytest.mark.parametrize("world_size", [1, 3])
def test_acpsgd(world_size: int) -> None:
    ranks = Simulation("acpsgd", SHAPES, world_size=world_size, rank=2, min_compression_rate=1.0)
    p, q = factors(2, 0), factors(2, 1)
    for engine in ranks.engines:
        engine.memory.load({"acpsgd.p": dict(p), "acpsgd.q": dict(q)})
    left = {name: value.double().T for name, value in p.items()}
    right = {name: value.double().T for name, value in q.items()}
    e = [torch.zeros(NUMEL, dtype=torch.float64) for _ in range(world_size)]
    for step in range(5):
        grads = gradients(world_size, step, NUMEL)
        c = [parts_of(g + own) for g, own in zip(grads, e, strict=True)]
        arrived = {"bias": mean([one["bias"] for one in c])}
        sent = [{"bias": one["bias"]} for one in c]
        for name in SIDES:
            if step % 2 == 0:
                basis = orthonormal(right[name])
                own = [one[name] @ basis for one in c]
                left[name] = mean(own)
                arrived[name] = left[name] @ basis.T
                shares = [factor @ basis.T for factor in own]
            else:
                basis = orthonormal(left[name])
                own = [one[name].T @ basis for one in c]
                right[name] = mean(own)
                arrived[name] = basis @ right[name].T
                shares = [basis @ factor.T for factor in own]
            for whole, share in zip(sent, shares, strict=True):
                whole[name] = share
        close(all_equal(ranks.step(grads)), flat_of(arrived), NEAR)
        e = [flat_of(one) - flat_of(share) for one, share in zip(c, sent, strict=True)]
        for index, residual in enumerate(e):
            close(ranks.memory(index), residual, NEAR)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_batched_powersgd(world_size: int) -> None:
    side, rank = 33, 2  # 33 x 33 = 1089 entries, of which 1052 are there
    ranks = Simulation("batched_powersgd", SHAPES, world_size=world_size, rank=rank)
    start = normal(rank * side, 78).view(rank, side)
    put(ranks, "batched_powersgd.q", {"w": start})
    q = start.double().T
    e = [torch.zeros(NUMEL, dtype=torch.float64) for _ in range(world_size)]

    def square(flat: Tensor) -> Tensor:
        return torch.cat([flat, flat.new_zeros(side * side - NUMEL)]).view(side, side)

    for step in range(4):
        grads = gradients(world_size, step, NUMEL)
        c = [square(g.double() + own) for g, own in zip(grads, e, strict=True)]
        p = orthonormal(mean([one @ q for one in c]))
        own = [one.T @ p for one in c]
        q = mean(own)
        close(all_equal(ranks.step(grads)), (p @ q.T).flatten()[:NUMEL], NEAR)
        e = [(one - p @ f.T).flatten()[:NUMEL] for one, f in zip(c, own, strict=True)]
        for index, residual in enumerate(e):
            close(ranks.memory(index), residual, NEAR)


@pytest.mark.parametrize("name", ["powersgd", "acpsgd"])
def test_factors_and_residuals_move_on_to_other_buckets(name: str) -> None:
    """Which bucket a matrix is in makes no difference: steps in one, in two, and in another one."""
    one, moved = (
        Simulation(name, SHAPES, world_size=2, rank=2, min_compression_rate=1.0) for _ in range(2)
    )
    layout = one.layout
    splits = ([[0, 1, 2]], [[2], [1, 0]], [[1, 2, 0]])
    for step in range(6):
        buckets = [layout.pick(places) for places in splits[step % 3]]
        order = [place for places in splits[step % 3] for place in places]
        grads = gradients(2, step, NUMEL)
        expected = one.step(grads)[0].split(layout.sizes)
        mixed = [torch.cat([grad.split(layout.sizes)[i] for i in order]) for grad in grads]
        got = moved.step(mixed, buckets=buckets)[0].split([layout.sizes[i] for i in order])
        for place, part in zip(order, got, strict=True):
            close(part, expected[place].double())


def test_names_have_feedback() -> None:
    for name in ("powersgd", "acpsgd", "batched_powersgd"):
        assert isinstance(make(name), ErrorFeedback)
