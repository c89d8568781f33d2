"""Plain re-implementations that schemes are compared with: a few lines each, in float64.

Nothing here is taken from the package but the draws of random signs, which have tests of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from commhooks import Simulation
from commhooks.core import Bucket, Layout
from commhooks.core._packed import Randomness
from commhooks.kernels.philox import signs

Lossy = Callable[[Tensor, int, int], Tensor]  # entries, shard, step -> what they arrive as


def normal(numel: int, *seed: int) -> Tensor:
    """N(0, 1) in float32."""
    number = 1
    for part in seed:
        number = number * 1009 + part
    return torch.randn(numel, generator=torch.Generator().manual_seed(number))


def rank_gradients(world_size: int, step: int, numel: int) -> list[Tensor]:
    return [normal(numel, step, rank) for rank in range(world_size)]


def mean(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack([tensor.double() for tensor in tensors]).mean(0)


# ---- what a payload stands for


def largest(c: Tensor, k: int) -> Tensor:
    """The k entries of largest magnitude, zero elsewhere."""
    places = c.abs().topk(k).indices
    return torch.zeros_like(c).index_copy_(0, places, c[places])


def by_blocks(lossy: Callable[[Tensor], Tensor], c: Tensor, block: int) -> Tensor:
    return torch.cat([lossy(part) for part in c.split(block)]) if c.numel() else c


def signed(c: Tensor, block: int) -> Tensor:
    """Signs times the block's mean magnitude; that of 0 is +."""
    return by_blocks(lambda b: torch.where(b < 0, -1.0, 1.0) * b.abs().mean(), c, block)


def levels(c: Tensor, top: int, block: int) -> Tensor:
    """The nearest of 2 top + 1 levels up to the block's largest magnitude."""

    def nearest(b: Tensor) -> Tensor:
        unit = b.abs().max() / top
        return (b / unit).round() * unit if unit else b

    return by_blocks(nearest, c, block)


def rotated_levels(c: Tensor, top: int, block: int, flips: Tensor) -> Tensor:
    """``levels`` of H D c, rotated back; the end is padded with zeros."""
    whole = torch.cat([c, c.new_zeros(-len(c) % block)])
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < block:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    matrix = matrix / math.sqrt(block)
    flips = flips[: len(whole)].double().view(-1, block)
    turned = (whole.view(-1, block) * flips) @ matrix
    back = levels(turned.flatten(), top, block).view(-1, block) @ matrix
    return (back * flips).flatten()[: len(c)]


def flips_of(layout: Layout, shard: int, step: int, numel: int, purpose: str = "") -> Tensor:
    """The random signs of a shard's rotation, with seed 0; the same on all ranks."""
    bucket = Bucket(torch.zeros(0), layout, step=step)
    stream = Randomness(bucket, "worker", purpose).row(shard).shared
    return signs(-(-numel // 4096) * 4096, step, stream.seed, stream.number, stream.first)


# ---- how payloads travel: the mean, and what each rank has not sent


def gathered(lossy: Lossy, cs: Sequence[Tensor], step: int = 0) -> tuple[Tensor, list[Tensor]]:
    """Everyone's payload goes to all."""
    sent = [lossy(c, 0, step) for c in cs]
    return mean(sent), [c - share for c, share in zip(cs, sent, strict=True)]


def in_two_phases(
    lossy: Lossy,
    cs: Sequence[Tensor],
    block: int,
    step: int = 0,
    sizes: Sequence[int] | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """Rank r averages shard r and rounds again; what that loses is its own, times the ranks.

    Shards are cut between blocks, which begin at the parameters of these sizes.
    """
    ranks, n, unit = len(cs), len(cs[0]), max(256, block)
    ends = list(accumulate(sizes or [n], initial=0))
    cuts = [0]
    for index in range(1, ranks):
        ideal = n * index // ranks
        begin = max(end for end in ends if end <= ideal)
        after = min(end for end in ends if end > begin)
        cuts.append(min(after, begin + (ideal - begin + unit // 2) // unit * unit))
    cuts.append(n)
    out, unsent = torch.zeros_like(cs[0]), [c.clone() for c in cs]
    for shard in range(ranks):
        inside = {end for end in ends if cuts[shard] < end < cuts[shard + 1]}
        edges = sorted({cuts[shard], cuts[shard + 1]} | inside)
        for begin, end in pairwise(edges):
            part = slice(begin, end)
            sent = [lossy(c[part], shard, step) for c in cs]
            average = mean(sent)
            out[part] = lossy(average, shard, step)
            for rest, share in zip(unsent, sent, strict=True):
                rest[part] -= share
            unsent[shard][part] += ranks * (average - out[part])
    return out, unsent


# ---- comparing


def close(actual: Tensor, expected: Tensor, tolerance: float = 2e-5) -> None:
    """float32 against float64: a few hundred roundings of entries of about 1."""
    torch.testing.assert_close(
        actual.double().flatten(), expected.flatten(), rtol=0, atol=tolerance
    )


def mostly_close(actual: Tensor, expected: Tensor) -> None:
    """The same, but for blocks where a mean of levels lay halfway between two.

    Means of few ranks' levels do at times; which way it goes is a matter of the last bit, and a
    rotation makes that a whole block's, in all later steps.
    """
    near = (actual.double().flatten() - expected.flatten()).abs() < 1e-4
    assert near.double().mean() > 0.75


def all_equal(means: Sequence[Tensor]) -> Tensor:
    """The average, which every rank got alike."""
    assert all(torch.equal(arrived, means[0]) for arrived in means)
    return means[0]


def assert_feedback(
    ranks: Simulation,
    exchange: Callable[[list[Tensor], int], tuple[Tensor, list[Tensor]]],
    steps: int,
    near: Callable[[Tensor, Tensor], None] = close,
) -> None:
    """Compares steps with ``exchange(corrected gradients, step)``: the mean, and what is kept."""
    world_size, n = len(ranks.engines), ranks.layout.numel
    e = [torch.zeros(n, dtype=torch.float64) for _ in range(world_size)]
    for step in range(steps):
        grads = rank_gradients(world_size, step, n)
        expected, e = exchange([g + kept for g, kept in zip(grads, e, strict=True)], step)
        near(all_equal(ranks.step(grads)), expected)
        for rank in range(world_size):
            near(ranks.memory(rank), e[rank])


def lost(ranks: Simulation, steps: Iterable[Sequence[Tensor]]) -> float:
    """The largest part of the gradients of these steps that is neither applied nor held."""
    missing: Tensor | float = 0.0
    for grads in steps:
        missing = missing + mean(grads) - ranks.step(list(grads))[0].double()
    return float((missing - mean([ranks.memory(rank) for rank, _ in enumerate(grads)])).abs().max())


def put(ranks: Simulation, key: str, values: dict[str, Tensor]) -> None:
    """Gives every rank the same memory to begin with."""
    for engine in ranks.engines:
        engine.memory.load({key: {name: value.clone() for name, value in values.items()}})
