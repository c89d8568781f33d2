"""The laws that a scheme obeys, as a suite to run on one's own: ``commhooks check my_scheme.py``.

Each law takes a fresh scheme and raises :class:`LawBroken` with the input that broke it. The
tests of this package run the same suite on every registered scheme.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from commhooks.core.layout import Layout
from commhooks.core.scheme import Scheme, walk
from commhooks.errors import Error
from commhooks.research.simulation import Simulation
from commhooks.schemes.casts import TwoPhaseCast
from commhooks.wrappers.cast import Cast
from commhooks.wrappers.feedback import keeps_residual, without_feedback

__all__ = ["LAWS", "LawBroken", "Verdict", "check_scheme", "laws_of"]

MakeScheme = Callable[[], Scheme]
SHAPES = {"weight": (24, 20), "bias": (24,), "conv": (6, 4, 3, 3), "row": (1, 33), "one": (1,)}
_NUMEL = sum(math.prod(shape) for shape in SHAPES.values())


class LawBroken(Error, AssertionError):
    """A law does not hold; the message has the input."""


@dataclass(frozen=True)
class Verdict:
    """What became of one law: ``error`` is empty if it holds."""

    law: str
    error: str

    @property
    def holds(self) -> bool:
        return not self.error


Law = Callable[[MakeScheme], None]
LAWS: dict[str, Law] = {}
_OF_AVERAGES: set[str] = set()
_OF_AGREEMENT: set[str] = set()


def _law(
    text: str, *, of_averages: bool = False, of_agreement: bool = False
) -> Callable[[Law], Law]:
    def add(check: Law) -> Law:
        LAWS[text] = check
        if of_averages:
            _OF_AVERAGES.add(text)
        if of_agreement:
            _OF_AGREEMENT.add(text)
        return check

    return add


def laws_of(scheme: Scheme) -> list[str]:
    """Keys of ``LAWS`` but for what a scheme that ``optimizes``, or does not agree, need not do."""
    others = _OF_AVERAGES if scheme.traits.returns == "update" else set()
    others = others if scheme.traits.agrees else others | _OF_AGREEMENT
    return [text for text in LAWS if text not in others]


def check_scheme(make: MakeScheme, laws: Iterable[str] | None = None) -> Iterator[Verdict]:
    """Runs laws; what a scheme raises counts as a broken law.

    Args:
        make: makes the scheme as users get it, with error feedback if it needs some.
        laws: keys of ``LAWS``; by default all that are for such a scheme.

    Example:
        >>> all(verdict.holds for verdict in check_scheme(lambda: make("powersgd")))
        True
    """
    if not make().traits.averages:
        raise ValueError("check_scheme: the laws are about schemes that average over ranks")
    for text in laws_of(make()) if laws is None else laws:
        error = ""
        try:
            LAWS[text](make)
        except LawBroken as broken:
            error = str(broken)
        except Exception as raised:  # whatever a user's code raises is a verdict on it
            error = f"{type(raised).__name__}: {raised}"
        yield Verdict(text, error)


def _need(holds: bool | Tensor, message: str) -> None:
    if not holds:
        raise LawBroken(message)


def _normal(numel: int, *seed: int) -> Tensor:
    number = 1
    for part in seed:
        number = number * 1009 + part
    return torch.randn(numel, generator=torch.Generator().manual_seed(number))


def _gradients(world_size: int, step: int, numel: int = _NUMEL) -> list[Tensor]:
    return [_normal(numel, step, rank) for rank in range(world_size)]


def _mean(grads: Sequence[Tensor]) -> Tensor:
    return torch.stack([grad.double() for grad in grads]).mean(0)


def _ranks(scheme: Scheme, world_size: int, numel: int | None = None) -> Simulation:
    shapes = SHAPES if numel is None else {"p": (numel,)}
    return Simulation(scheme, shapes, world_size=world_size, seed=5)


def _memory(ranks: Simulation) -> list[dict[tuple[str, str], Tensor]]:
    return [
        {(key, name): value.clone() for key, name, value in engine.memory.items()}
        for engine in ranks.engines
    ]


def _same_memory(a: Simulation, b: Simulation) -> bool:
    return all(
        mine.keys() == theirs.keys() and all(torch.equal(v, theirs[k]) for k, v in mine.items())
        for mine, theirs in zip(_memory(a), _memory(b), strict=True)
    )


@_law("any size and shape travels")
def _sizes(make: MakeScheme) -> None:
    for numel in (0, 1, 2, 31, 33, 257, 4099):
        for shape in ((numel,), (numel, 1), (1, numel)):
            layout = Layout(["p"], [shape])
            ranks = Simulation(make(), {"p": shape}, world_size=3)
            for step in range(2):
                for mean in ranks.step(_gradients(3, step, numel), buckets=[layout]):
                    _need(mean.shape == (numel,), f"shape {shape} gives a mean of {mean.shape}")
                    _need(mean.isfinite().all(), f"shape {shape}: the mean is not finite")


@_law("all ranks get equal bits, for 1 to 8 ranks", of_agreement=True)
def _agreement(make: MakeScheme) -> None:
    for world_size in (1, 2, 3, 4, 5, 8):
        ranks = _ranks(make(), world_size)
        for step in range(3):
            means = ranks.step(_gradients(world_size, step))
            equal = all(torch.equal(mean, means[0]) for mean in means)
            _need(equal, f"{world_size} ranks differ in step {step}")


@_law("payload sizes do not depend on values, and rounds are as declared")
def _payload_sizes(make: MakeScheme) -> None:
    scheme, found = make(), []
    for factor in (0.0, 1.0, 1e20):
        ranks = _ranks(scheme, 3)
        ranks.step([grad * factor for grad in _gradients(3, 0)])
        found.append(ranks.requests)
    _need(
        found[0] == found[1] == found[2], f"sizes differ for zeros, N(0, 1), 1e20 N(0, 1): {found}"
    )
    rounds = len(found[0])
    _need(rounds <= scheme.traits.rounds, f"{rounds} collectives, rounds = {scheme.traits.rounds}")


@_law("two runs are equal bit for bit")
def _determinism(make: MakeScheme) -> None:
    first, second = _ranks(make(), 3), _ranks(make(), 3)
    for step in range(3):
        a, b = (ranks.step(_gradients(3, step))[0] for ranks in (first, second))
        _need(torch.equal(a, b), f"step {step} differs between two runs")


@_law("zero arrives as zero", of_averages=True)
def _zero(make: MakeScheme) -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        ranks = _ranks(make(), 3)
        for _ in range(2):
            mean = ranks.step([torch.zeros(_NUMEL, dtype=dtype)] * 3)[0]
            _need(not mean.any(), f"zeros of {dtype} arrive as {mean.abs().max().item()}")


@_law("signs and sizes make no difference", of_averages=True)
def _homogeneity(make: MakeScheme) -> None:
    grads = [grad.abs() + 0.1 for grad in _gradients(3, 1)]
    errors = {}
    for factor in (1.0, -1.0, 1e-3, 1e3, 1e20):
        scaled = [grad * factor for grad in grads]
        exact = _mean(scaled)
        mean = _ranks(without_feedback(make()), 3).step(scaled)[0].double()
        if mean.isfinite().all():  # an overflow may arrive as one
            errors[factor] = float((mean - exact).norm() / exact.norm())
    worst, best = max(errors.values()), min(errors.values())
    text = ", ".join(f"{factor:g}: {error:.3g}" for factor, error in errors.items())
    _need(worst <= 1.5 * best + 1e-2, f"relative errors for positive entries times {text}")


@_law("gradients keep their dtype")
def _dtypes(make: MakeScheme) -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        ranks = _ranks(make(), 2)
        for step in range(2):
            mean = ranks.step([grad.to(dtype) for grad in _gradients(2, step)])[0]
            _need(mean.dtype == dtype, f"{dtype} arrives as {mean.dtype}")
            _need(mean.isfinite().all(), f"{dtype}: the mean is not finite")


@_law("sums over entries and ranks do not overflow 16 bits")
def _overflow(make: MakeScheme) -> None:
    ranks = _ranks(make(), 4, 36)
    for mean in ranks.step([torch.full((36,), 20000.0, dtype=torch.float16)] * 4):
        _need((mean.abs() <= 50000.0).all(), "four ranks' 20000 in float16 are too large a sum")


@_law("what is not finite arrives so on every rank, and memory stays as it was", of_agreement=True)
def _not_finite(make: MakeScheme) -> None:
    for place in (0, 77, _NUMEL - 1):
        for bad in (math.inf, math.nan):
            ranks, clean = _ranks(make(), 3), _ranks(make(), 3)
            for step in range(2):
                ranks.step(_gradients(3, step))
                clean.step(_gradients(3, step))
            grads = _gradients(3, 50)
            grads[1][place] = bad
            for rank, mean in enumerate(ranks.step(grads)):
                _need(not mean[place].isfinite(), f"{bad} at {place} is finite on rank {rank}")
            _need(_same_memory(ranks, clean), f"{bad} at {place} of one rank changes memory")


@_law("biased or not, as declared", of_averages=True)
def _bias(make: MakeScheme) -> None:
    scheme = without_feedback(make())
    if scheme.traits.biased:
        grads = _gradients(2, 0)
        exact = _mean(grads)
        lost = float((_ranks(scheme, 2).step(grads)[0] - exact).norm() / exact.norm())
        _need(lost <= 1.0 + 1e-6, f"loses {lost:.3f} of |x|: not a contraction, feedback diverges")
        return
    # Along a direction draws average out far sooner than entry by entry: 1/4096 of the gradient
    # shows, which is above what rounding to 16 bits adds up to over this many entries.
    grads = _gradients(2, 0, 2**16)
    exact, draws = _mean(grads), 64
    ranks = _ranks(scheme, 2, 2**16)
    total = square = torch.zeros_like(exact)
    along: dict[str, list[float]] = {}
    for _ in range(draws):
        error = ranks.step(grads)[0].double() - exact
        total, square = total + error, square + error.square()
        for name, direction in _directions(exact):
            along.setdefault(name, []).append(float(error @ direction))
    for name, direction in _directions(exact):
        found = torch.tensor(along[name], dtype=torch.float64)
        off, spread = float(found.mean().abs()), float(found.std()) / math.sqrt(draws)
        size = float(exact.abs() @ direction.abs())
        text = f"{name}: the mean of {draws} draws is off by {off / size:.3g}, relative"
        _need(off <= 5 * spread + 2.0**-12 * size, f"{text}; its error is {spread / size:.3g}")
    left = float(total.norm()) / draws
    # Where every draw is the same, rounding leaves a sum that may be a little below zero.
    spread_of_all = float(square.sum() - total.square().sum() / draws) / (draws - 1)
    noise = math.sqrt(max(0.0, spread_of_all) / draws)
    text = f"the mean of {draws} draws is off by {left:.3g}, its standard error is {noise:.3g}"
    _need(left <= 1.25 * noise + float(exact.norm()) * 2.0**-8, text)


def _directions(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """What a bias of every entry, of large or small ones, or of one sign adds up along."""
    small = x.abs() < 0.5 * x.square().mean().sqrt()
    yield "in size", x
    yield "small entries", x.sign() * small
    yield "large entries", x.sign() * ~small
    yield "in sign", torch.ones_like(x)


@_law("the variance is what was declared, or less", of_averages=True)
def _variance(make: MakeScheme) -> None:
    scheme = without_feedback(make())
    if scheme.traits.biased:
        return
    allowed = scheme.traits.error.variance
    for name, x in _shapes_of_entries(4096):
        ranks = _ranks(scheme, 1, 4096)
        errors = [(ranks.step([x])[0] - x).square().sum() / x.square().sum() for _ in range(16)]
        found = float(torch.stack(errors).mean())
        bound = ((1 + allowed) ** scheme.traits.rounds - 1) * 1.1 + 2.0**-14
        _need(found <= bound, f"{found:.3g} |x|^2 on {name}, variance = {allowed:.3g}")


def _shapes_of_entries(numel: int) -> Iterator[tuple[str, Tensor]]:
    """Gradients that schemes find hard: heavy tails, exact zeros, few different values."""
    yield "N(0, 1)", _normal(numel, 7)
    yield "N(0, 1)^5", _normal(numel, 8) ** 5
    yield "1 % that is not 0", _normal(numel, 9) * (_normal(numel, 10).abs() > 2.576)
    for equal in (2, 4):
        x = torch.zeros(numel)
        for first in range(equal):
            x[first::512] = 1.0
        yield f"{equal} equal entries of 512, all others 0", x
    yield "equal entries", torch.full((numel,), 0.7)
    yield "two values", torch.where(_normal(numel, 11) < 0, 1.0, -0.3)


@_law("applied and residual sum to the gradients", of_averages=True)
def _conservation(make: MakeScheme) -> None:
    scheme = make()
    if not keeps_residual(scheme):
        return
    narrow = any(isinstance(one, (Cast, TwoPhaseCast)) for one in walk(scheme))
    for world_size in range(1, 9):
        ranks = _ranks(scheme, world_size)
        applied = total = torch.zeros(_NUMEL, dtype=torch.float64)
        for step in range(5 if world_size == 3 else 2):
            grads = _gradients(world_size, step)
            applied = applied + ranks.step(grads)[0]
            total = total + _mean(grads)
        residual = _mean([ranks.memory(rank) for rank in range(world_size)])
        error = float((applied + residual - total).abs().max() / total.abs().max())
        text = f"{world_size} ranks: off by {error:.3g} of the largest sum after {step + 1} steps"
        _need(error < (2.0**-7 if narrow else 2.0**-12), text)


@_law("an average is over all ranks, 1 to 8 of them", of_averages=True)
def _all_ranks(make: MakeScheme) -> None:
    scheme = make()
    if without_feedback(scheme).traits.biased:  # what is applied and kept tells that
        return
    for world_size in range(1, 9):
        grads = _gradients(world_size, 3, 4096)
        exact, ranks = _mean(grads), _ranks(scheme, world_size, 4096)
        means = torch.stack([ranks.step(grads)[0].double() for _ in range(16)])
        size = float(means.mean(0) @ exact / (exact @ exact))
        # Of 16 draws it is within 0.04 even at a variance of 11; one rank too few is 1 / 8.
        _need(abs(size - 1) < 0.1, f"{world_size} ranks: {size:.3g} times the average arrives")


@_law("the last entry arrives, whatever the size", of_averages=True)
def _last_entry(make: MakeScheme) -> None:
    scheme, steps = make(), 16
    keeps = keeps_residual(scheme)
    if not keeps and without_feedback(scheme).traits.biased:
        return
    for numel in (33, 257, 513, 769, 1025, 2049, 4097):
        ranks = _ranks(make(), 3, numel)
        grad = torch.full((numel,), 0.2)
        grad[-1] = 1.0
        arrived = sum(float(ranks.step([grad] * 3)[0][-1]) for _ in range(steps))
        held = float(_mean([ranks.memory(rank) for rank in range(3)])[-1]) if keeps else 0.0
        found = (arrived + held) / steps
        _need(abs(found - 1) < 0.3, f"of {numel} entries {found:.3g} of the last one arrives")


@_law("residuals stay bounded", of_averages=True)
def _bounded(make: MakeScheme) -> None:
    scheme = make()
    if not keeps_residual(scheme):
        return
    ranks, sizes = _ranks(scheme, 2), []
    for step in range(800):
        ranks.step(_gradients(2, step))
        sizes.append(float(ranks.memory(0).norm()))
    early, late = max(sizes[75:100]), max(sizes[750:])
    _need(late <= 1.5 * early + 1e-6, f"|e| is {early:.3g} after 100 steps, {late:.3g} after 800")


@_law("save, load, continue equals not stopping, whatever the first buckets are")
def _round_trip(make: MakeScheme) -> None:
    ranks, resumed = _ranks(make(), 3), _ranks(make(), 3)
    layout = ranks.layout
    shuffled = layout.pick([3, 0, 4, 2, 1])
    split = [shuffled.pick([0, 1]), shuffled.pick([2, 3, 4])]
    for step in range(3):
        ranks.step(_gradients(3, step))
    resumed.resume(ranks)
    for step in range(3, 6):
        grads = _gradients(3, step)
        expected = ranks.step(grads)[0]
        if step == 3:  # a run that starts lays its buckets out otherwise
            moved = resumed.step([_moved(g, layout, shuffled) for g in grads], buckets=split)[0]
            found = _moved(moved, shuffled, layout)
        else:
            found = resumed.step(grads)[0]
        _need(torch.equal(expected, found), f"differs in step {step}, {step - 2} after loading")


def _moved(flat: Tensor, old: Layout, new: Layout) -> Tensor:
    """A flat tensor with its parameters in another order."""
    parts = dict(zip(old.names, flat.split(old.sizes), strict=True))
    return torch.cat([parts[name] for name in new.names])


@_law("three nodes that disagree find their common optimum", of_averages=True)
def _convergence(make: MakeScheme) -> None:
    # f_i = <a_i, x>^2 + |x|^2 / 4. A biased scheme without feedback climbs here, or stands still.
    # Many copies side by side, so that blocks and matrices have something to share.
    scheme, copies = make(), 300
    x = _normal(3 * copies, 1)
    lost = _ranks(without_feedback(scheme), 1, len(x)).step([x])[0] - x
    kept = 1 - float(lost.square().sum()) / len(x)
    # A residual is late by 1 / kept steps: where that is long, a milder problem and smaller steps.
    mild = kept < 0.1 and not scheme.traits.error.variance
    scale, rate, steps = (1 / 9, 0.001, 7000) if mild else (1.0, 0.01, 1000)
    nodes = torch.tensor([[-3.0, 2, 2], [2, -3, 2], [2, 2, -3]], dtype=torch.float64)
    ranks = _ranks(scheme, 3, 3 * copies)
    x = torch.ones(copies, 3, dtype=torch.float64) * torch.linspace(0.5, 1.5, copies)[:, None]
    begin = x.norm()
    for _ in range(steps):
        grads = [2 * scale * (x @ a)[:, None] * a + x / 2 for a in nodes]
        x = x - rate * ranks.step([grad.flatten() for grad in grads])[0].view(copies, 3)
    left = float(x.norm() / begin)
    _need(left < 0.1, f"|x| is {left:.3g} of what it was after {steps} steps of {rate}")
