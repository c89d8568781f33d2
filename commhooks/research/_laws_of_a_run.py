"""Defines the laws of many steps: means of random draws, residuals, checkpoints, convergence."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from commhooks.core._layout import Layout
from commhooks.core._scheme import Scheme, walk
from commhooks.research._laws import (
    NUMEL,
    SHAPES,
    Laws,
    MakeScheme,
    check_law,
    exact_mean,
    gradients,
    in_words,
    normal,
    ranks_of,
)
from commhooks.schemes.casts import TwoPhaseCast
from commhooks.wrappers._cast import Cast
from commhooks.wrappers._feedback import RESIDUAL, keeps_residual, without_feedback

__all__ = ["OF_A_RUN"]

OF_A_RUN = Laws()
_UNBIASED = "Declare error=Biased() in traits, or scale what comes out"


@OF_A_RUN.add("biased or not, as declared", guide="What a scheme declares", of_averages=True)
def _bias(make: MakeScheme) -> None:
    scheme = without_feedback(make())
    if scheme.traits.biased:
        grads = gradients(2, 0)
        exact = exact_mean(grads)
        lost = float((ranks_of(scheme, 2).step(grads)[0] - exact).norm() / exact.norm())
        check_law(
            lost <= 1.0 + 1e-6, f"loses {lost:.3f} of |x|: not a contraction, feedback diverges"
        )
        return
    # The projection of the error on one direction has a far smaller standard error than its norm,
    # so a bias of 1/4096 shows. Rounding to 16 bits adds up to less over this many entries.
    grads = gradients(2, 0, 2**16)
    exact, draws = exact_mean(grads), 64
    ranks = ranks_of(scheme, 2, 2**16)
    total = square = torch.zeros_like(exact)
    along: dict[str, list[float]] = {}
    for _ in range(draws):
        error = ranks.step(grads)[0].double() - exact
        total, square = total + error, square + error.square()
        for name, direction in _directions(exact):
            along.setdefault(name, []).append(float(error @ direction))
    for name, direction in _directions(exact):
        projections = torch.tensor(along[name], dtype=torch.float64)
        off, spread = float(projections.mean().abs()), float(projections.std()) / math.sqrt(draws)
        size = float(exact.abs() @ direction.abs())
        text = f"{name}: the mean of {draws} draws is off by {off / size:.3g}, relative"
        text = f"{text}; its error is {spread / size:.3g}. {_UNBIASED}"
        check_law(off <= 5 * spread + 2.0**-12 * size, text)
    # A bias along any other direction shows in the norm: without one, its square is the squared
    # standard error in expectation, and varies little over this many entries.
    bias = float(total.norm()) / draws
    # max: where all draws are equal, rounding may leave a variance a little below zero.
    variance = float(square.sum() - total.square().sum() / draws) / (draws - 1)
    noise = math.sqrt(max(0.0, variance) / draws)
    text = f"the mean of {draws} draws is off by {bias:.3g}, its standard error is {noise:.3g}"
    text = f"{text}. {_UNBIASED}"
    check_law(bias <= 1.25 * noise + float(exact.norm()) * 2.0**-8, text)


def _directions(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yields directions along which a bias of all, small or large entries adds up."""
    small = x.abs() < 0.5 * x.square().mean().sqrt()
    yield "in size", x
    yield "small entries", x.sign() * small
    yield "large entries", x.sign() * ~small
    yield "in sign", torch.ones_like(x)


@OF_A_RUN.add(
    "the variance is what was declared, or less", guide="What a scheme declares", of_averages=True
)
def _variance(make: MakeScheme) -> None:
    scheme = without_feedback(make())
    if scheme.traits.biased:
        return
    allowed = scheme.traits.error.variance
    for name, x in _shapes_of_entries(4096):
        ranks = ranks_of(scheme, 1, 4096)
        errors = [(ranks.step([x])[0] - x).square().sum() / x.square().sum() for _ in range(16)]
        measured = float(torch.stack(errors).mean())
        # Every round may round once more, and factors of 1 + variance multiply. A tenth more: the
        # mean of 16 draws is a random number.
        bound = ((1 + allowed) ** scheme.traits.rounds - 1) * 1.1 + 2.0**-14
        check_law(measured <= bound, f"{measured:.3g} |x|^2 on {name}, variance = {allowed:.3g}")


def _shapes_of_entries(numel: int) -> Iterator[tuple[str, Tensor]]:
    """Yields gradients that are hard to compress: heavy tails, exact zeros, few distinct values."""
    yield "N(0, 1)", normal(numel, 7)
    yield "N(0, 1)^5", normal(numel, 8) ** 5
    yield "1 % that is not 0", normal(numel, 9) * (normal(numel, 10).abs() > 2.576)
    for equal in (2, 4):
        x = torch.zeros(numel)
        for first in range(equal):
            x[first::512] = 1.0
        yield f"{equal} equal entries of 512, all others 0", x
    yield "equal entries", torch.full((numel,), 0.7)
    yield "two values", torch.where(normal(numel, 11) < 0, 1.0, -0.3)


@OF_A_RUN.add(
    "applied and residual sum to the gradients",
    guide="Several collectives per bucket",
    of_averages=True,
)
def _conservation(make: MakeScheme) -> None:
    scheme = make()
    if not keeps_residual(scheme):
        return
    # A sum or mean that is rounded to 16 bits on the way loses something that no residual holds.
    narrow = any(isinstance(inside, (Cast, TwoPhaseCast)) for inside in walk(scheme))
    for world_size in range(1, 9):
        # Two steps show a residual that is lost or counted twice; one size runs longer.
        steps = 5 if world_size == 3 else 2
        error = _lost(scheme, world_size, steps)
        text = f"{in_words(world_size)}: off by {error:.3g} of the largest sum after {steps} steps"
        check_law(
            error < (2.0**-7 if narrow else 2.0**-12),
            f"{text}: Result(mean, sent=...) says what this rank has sent, and bucket.gradient "
            f"keeps its entries (an all-reduce overwrites its tensor)",
        )


@OF_A_RUN.add(
    "residuals keep what a cast around the scheme rounds",
    guide="Several collectives per bucket",
    of_averages=True,
)
def _conservation_in_16_bits(make: MakeScheme) -> None:
    scheme = make()
    if not keeps_residual(scheme):
        return
    # On one rank no sum is rounded: what the payload loses in 16 bits is this rank's own.
    error = _lost(Cast(scheme, torch.bfloat16), 1, 2)
    text = (
        f"off by {error:.3g} of the largest sum in bf16: what was sent is in request.sent "
        f"after the yield, where it is not None"
    )
    check_law(error < 2.0**-12, text)


def _lost(scheme: Scheme, world_size: int, steps: int) -> float:
    """Returns how far applied plus residual differ from the gradients, over the largest sum."""
    ranks = ranks_of(scheme, world_size)
    applied = total = torch.zeros(NUMEL, dtype=torch.float64)
    for step in range(steps):
        grads = gradients(world_size, step)
        applied = applied + ranks.step(grads)[0]
        total = total + exact_mean(grads)
    residual = exact_mean([ranks.memory(rank) for rank in range(world_size)])
    # Rules may give parameters no feedback: what they lose is kept nowhere.
    known = [ranks.engines[0].memory.get(RESIDUAL, name) is not None for name in SHAPES]
    mask = torch.tensor(known).repeat_interleave(torch.tensor(ranks.layout.sizes))
    return float(((applied + residual - total) * mask).abs().max() / total.abs().max())


@OF_A_RUN.add("an average is over all ranks, 1 to 8 of them", of_averages=True)
def _all_ranks(make: MakeScheme) -> None:
    scheme = make()
    if without_feedback(scheme).traits.biased:  # the sum of applied and residual shows it
        return
    for world_size in range(1, 9):
        grads = gradients(world_size, 3, 4096)
        exact, ranks = exact_mean(grads), ranks_of(scheme, world_size, 4096)
        means = torch.stack([ranks.step(grads)[0].double() for _ in range(16)])
        size = float(means.mean(0) @ exact / (exact @ exact))
        # The mean of 16 draws is off by 0.04 at most, even for a variance of 11. A rank that is
        # left out makes a difference of 1 / 8 or more.
        check_law(
            abs(size - 1) < 0.1, f"{in_words(world_size)}: {size:.3g} times the average comes out"
        )


@OF_A_RUN.add("the last entry is averaged, whatever the size", of_averages=True)
def _last_entry(make: MakeScheme) -> None:
    scheme, steps = make(), 16
    keeps = keeps_residual(scheme)
    if not keeps and without_feedback(scheme).traits.biased:
        return
    # One entry more than whole blocks: the last one is in a block or shard with no other entry.
    for numel in (33, 257, 513, 769, 1025, 2049, 4097):
        ranks = ranks_of(make(), 3, numel)
        grad = torch.full((numel,), 0.2)
        grad[-1] = 1.0
        arrived = sum(float(ranks.step([grad] * 3)[0][-1]) for _ in range(steps))
        held = float(exact_mean([ranks.memory(rank) for rank in range(3)])[-1]) if keeps else 0.0
        share = (arrived + held) / steps
        check_law(abs(share - 1) < 0.3, f"of {numel} entries {share:.3g} of the last one comes out")


@OF_A_RUN.add("residuals stay bounded", guide="What a scheme declares", of_averages=True)
def _bounded(make: MakeScheme) -> None:
    scheme = make()
    if not keeps_residual(scheme):
        return
    ranks, sizes = ranks_of(scheme, 2), []
    for step in range(800):
        ranks.step(gradients(2, step))
        sizes.append(float(ranks.memory(0).norm()))
    # By step 100 a bounded residual has its size. One that grows with the square root of the steps,
    # as a sum of random draws does, is 2.8 times as large at step 800.
    early, late = max(sizes[75:100]), max(sizes[750:])
    check_law(
        late <= 1.5 * early + 1e-6, f"|e| is {early:.3g} after 100 steps, {late:.3g} after 800"
    )


@OF_A_RUN.add(
    "save, load, continue equals not stopping, whatever the first buckets are",
    guide="Persistent state",
)
def _round_trip(make: MakeScheme) -> None:
    ranks, resumed = ranks_of(make(), 3), ranks_of(make(), 3)
    layout = ranks.layout
    # DDP rebuilds its buckets after the first step, so the first step of a resumed run has other
    # ones than the run had when it was saved.
    shuffled = layout.pick([3, 0, 4, 2, 1])
    split = [shuffled.pick([0, 1]), shuffled.pick([2, 3, 4])]
    for step in range(3):
        ranks.step(gradients(3, step))
    resumed.resume(ranks)
    for step in range(3, 6):
        grads = gradients(3, step)
        expected = ranks.step(grads)[0]
        if step == 3:
            moved = resumed.step([_moved(g, layout, shuffled) for g in grads], buckets=split)[0]
            mean = _moved(moved, shuffled, layout)
        else:
            mean = resumed.step(grads)[0]
        check_law(
            torch.equal(expected, mean),
            f"differs in step {step}, {step - 2} after loading: is something kept outside of "
            f"Slots, or by bucket?",
        )


def _moved(flat: Tensor, old: Layout, new: Layout) -> Tensor:
    """Returns a flat tensor with its parameters in the order of ``new``."""
    parts = dict(zip(old.names, flat.split(old.sizes), strict=True))
    return torch.cat([parts[name] for name in new.names])


@OF_A_RUN.add(
    "three nodes that disagree find their common optimum",
    guide="What a scheme declares",
    of_averages=True,
)
def _convergence(make: MakeScheme) -> None:
    # f_i = <a_i, x>^2 + |x|^2 / 4. A biased scheme without feedback climbs here, or stands still.
    # 300 copies of the problem, so that blocks and matrices have many entries.
    scheme, copies = make(), 300
    x = normal(3 * copies, 1)
    lost = ranks_of(without_feedback(scheme), 1, len(x)).step([x])[0] - x
    kept = 1 - float(lost.square().sum()) / len(x)
    # A residual arrives 1 / kept steps late, and x has to move little in that time: a scheme that
    # keeps little gets a milder problem and smaller steps.
    mild = kept < 0.1 and not scheme.traits.error.variance
    scale, rate, steps = (1 / 9, 0.001, 7000) if mild else (1.0, 0.01, 1000)
    nodes = torch.tensor([[-3.0, 2, 2], [2, -3, 2], [2, 2, -3]], dtype=torch.float64)
    ranks = ranks_of(scheme, 3, 3 * copies)
    x = torch.ones(copies, 3, dtype=torch.float64) * torch.linspace(0.5, 1.5, copies)[:, None]
    begin = x.norm()
    for _ in range(steps):
        grads = [2 * scale * (x @ a)[:, None] * a + x / 2 for a in nodes]
        x = x - rate * ranks.step([grad.flatten() for grad in grads])[0].view(copies, 3)
    share = float(x.norm() / begin)
    check_law(share < 0.1, f"|x| is {share:.3g} of what it was after {steps} steps of {rate}")
