"""Compares the errors of a verified step with the scheme's bound, and names the violations."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from commhooks.core._scheme import Scheme, children, walk
from commhooks.kernels.fingerprint import ROWS
from commhooks.schemes.casts import TwoPhaseCast
from commhooks.verify._equal import describe_others, minority_ranks
from commhooks.verify._measure import Measurement, ShardMeasurement
from commhooks.wrappers._cast import Cast
from commhooks.wrappers._feedback import ErrorFeedback, Feedback, keeps_residual, unwrap_flush
from commhooks.wrappers._make import short_repr
from commhooks.wrappers._schedules import running_at
from ddp_core.exchange._errors import ranks_in_words

__all__ = [
    "ErrorBound",
    "Finding",
    "VerifiedRow",
    "error_bound_of",
    "judge",
    "judge_parameters",
    "judge_shards",
]

# A declared variance is an expectation. The squared error of one draw is far below this multiple of
# it in a bucket of many entries; with few entries and levels at random it may come near.
_DRAW = 8.0
# As the laws of ``commhooks check``: sums in 32 bits, and sums or payloads that travel in 16.
_WIDE, _NARROW = 2.0**-12, 2.0**-7
# Kernels take smaller numbers for zero: scales of levels and processors' subnormal numbers.
_LEAST = 1e-30


class Finding(NamedTuple):
    """Describes one violation in a verified step.

    Attributes:
        step, bucket, parameter: place; the bucket is -1 if the parameter itself is wrong.
        kind: "ranks differ", "error", "not finite" or "parameters differ".
        ranks: ranks that the finding concerns.
        text: the finding in words, with the numbers.
    """

    step: int
    bucket: int
    parameter: str
    kind: str
    ranks: tuple[int, ...]
    text: str

    def __str__(self) -> str:
        bucket = f"bucket {self.bucket}, " * (self.bucket >= 0)
        where = f"step {self.step}, {ranks_in_words(self.ranks)}, {bucket}parameter"
        return f"{where} {self.parameter!r}: {self.text}"


class VerifiedRow(NamedTuple):
    """Holds one row of the report: error of a parameter's averaged gradient in a verified step.

    Attributes:
        step, bucket, parameter: place.
        error: norm of the average minus the dense mean, over the norm of the dense mean.
        cosine: cosine of average and dense mean.
        norm: norm of the dense mean.
    """

    step: int
    bucket: int
    parameter: str
    error: float
    cosine: float
    norm: float


class ErrorBound(NamedTuple):
    """Bounds the error that a scheme may make in one exchange of a bucket.

    Attributes:
        name: the scheme, in words.
        averages: whether the result is an average of gradients, so that an error is defined.
        agrees: whether all ranks get the same bits.
        residual: whether the error is that of gradient plus residual minus the new residual.
        rounding: allowed error relative to what the ranks average; None: not bounded.
        variance: allowed squared error, relative to the largest of what the ranks average.
    """

    name: str
    averages: bool
    agrees: bool
    residual: bool
    rounding: float | None
    variance: float


@lru_cache(maxsize=64)
def _name_of(scheme: Scheme) -> str:
    return short_repr(unwrap_flush(scheme))


def error_bound_of(scheme: Scheme, world_size: int, step: int = 0) -> ErrorBound:
    """Returns the bound that the traits of a scheme imply for one step.

    A scheme with error feedback loses nothing: gradient plus residual minus the new residual, which
    the ranks have sent, averages to the result. Biased schemes without feedback have no bound; nor
    have wrappers that keep something else than a residual. If parameters have different schemes,
    the loosest bound holds.
    """
    try:
        name = _name_of(scheme)
    except TypeError:  # a setting that has no hash, such as a list
        name = _name_of.__wrapped__(scheme)
    scheme = running_at(scheme, step)
    traits, inside = scheme.traits, list(walk(scheme))
    has_other_feedback = any(
        isinstance(part, Feedback) and not isinstance(part, ErrorFeedback) for part in inside
    )
    narrow = any(isinstance(part, (Cast, TwoPhaseCast)) for part in inside)
    # A sum along a ring rounds once per rank.
    rounding = _NARROW * max(1.0, math.sqrt(world_size / 8)) if narrow else _WIDE
    averages = traits.returns == "mean"
    without = list(_without_residual(scheme))
    variances = [_variance(part, world_size) for part in without]
    bounded = averages and not has_other_feedback and None not in variances
    return ErrorBound(
        name=name,
        averages=averages,
        agrees=traits.agrees and traits.averages,
        residual=keeps_residual(scheme),
        rounding=rounding if bounded else None,
        variance=_DRAW
        * max((variance for variance in variances if variance is not None), default=0.0),
    )


def _variance(scheme: Scheme, world_size: int) -> float | None:
    """Bounds the squared error of a scheme without residual, relative to the largest gradient.

    None: there is no bound.
    """
    traits = scheme.traits
    growth = max(part.error_growth(world_size) for part in walk(scheme))
    if traits.biased or math.isinf(growth):
        return None
    variance = traits.error.variance * growth
    # Every round may round once more, and factors of 1 + variance multiply.
    bound: float = (1.0 + variance) ** max(traits.rounds, 1) - 1.0
    return bound


def _without_residual(scheme: Scheme) -> Iterator[Scheme]:
    """Yields the parts of a scheme whose errors no residual keeps."""
    if isinstance(scheme, ErrorFeedback):
        return
    if not keeps_residual(scheme):
        yield scheme
        return
    for child in children(scheme):
        yield from _without_residual(child)


def judge(
    bound: ErrorBound,
    step: int,
    measured: Measurement,
    ranks: Tensor,
    sketches: Tensor,
) -> tuple[list[VerifiedRow], list[Finding]]:
    """Returns the rows and findings of one bucket; the same on every rank.

    Args:
        bound: bound of the scheme.
        step: number of the step.
        measured: the bucket's measurement.
        ranks: the rows of all ranks, float64 of shape ``(ranks, len(ROWS), parameters)``.
        sketches: mean over ranks of the bucket's sketches.
    """
    bucket, layout, dtype = measured.bucket, measured.layout, measured.dtype
    gradients, mean, residuals, differences = ranks[:, :-1].sqrt().unbind(1)
    findings: list[Finding] = []

    def find(position: int, kind: str, which: list[int], text: str) -> None:
        name = layout.names[position]
        findings.append(Finding(step, bucket, name, kind, tuple(which), text))

    for position, ill in enumerate((~gradients.isfinite()).T.tolist()):
        if any(ill):
            which = [rank for rank, bad in enumerate(ill) if bad]
            find(position, "not finite", which, "the gradient is not finite there before averaging")
    if bound.agrees:
        for position, which in _differing_averages(ranks, mean):
            other_ranks = describe_others(which, len(ranks))
            reason = f"the average of {bound.name} has other bits here than on {other_ranks}"
            find(position, "ranks differ", which, reason)
    if not bound.averages:
        return [], findings
    error, balance, dense = measured.errors(sketches)
    averaged = mean.square().mean(0)
    dots = ((gradients.square() + mean.square() - differences.square()) / 2).mean(0)
    norms = _dense_norms(error.square(), dots, averaged, dense.square())
    rows = _rows_of(step, bucket, layout.names, error, norms, averaged.sqrt(), dots)
    if gradients.isfinite().all():
        if lost := _lost_values(mean):
            position, which = lost
            find(position, "not finite", which, _lost_message(bound))
        if lost or not residuals.isfinite().all():
            return rows, findings
        sizes = torch.sqrt((gradients.square() + residuals.square()).sum(1))
        deviation = balance if balance is not None else error
        if text := _exceeded_bound(bound, dtype, sizes, deviation, layout.numel):
            find(int(deviation.argmax()), "error", list(range(len(sizes))), text)
    return rows, findings


def judge_shards(
    bound: ErrorBound, step: int, measured: ShardMeasurement, ranks: Tensor, sketches: Tensor
) -> tuple[list[VerifiedRow], list[Finding]]:
    """Returns the rows and findings of one bucket; the same on every rank.

    Args:
        bound: bound of the scheme.
        step: number of the step.
        measured: the bucket's measurement.
        ranks: the rows of all ranks, float64 of shape ``(ranks, rows, parameters)``.
        sketches: mean over ranks of the bucket's sketches.
    """
    gradients, mean, residuals = ranks.sqrt().unbind(1)
    findings: list[Finding] = []

    def find(name: str, kind: str, which: list[int], text: str) -> None:
        findings.append(Finding(step, measured.bucket, name, kind, tuple(which), text))

    for name, ill in zip(measured.names, (~gradients.isfinite()).T.tolist(), strict=True):
        if any(ill):
            which = [rank for rank, bad in enumerate(ill) if bad]
            find(name, "not finite", which, "the gradient is not finite there before averaging")
    if not bound.averages:
        return [], findings
    compared = measured.compared(ranks, sketches)
    rows = _rows_of(step, measured.bucket, measured.names, *compared[:4])
    if gradients.isfinite().all():
        if lost := _lost_values(mean):
            position, which = lost
            find(measured.names[position], "not finite", which, _lost_message(bound))
        if lost or not residuals.isfinite().all():
            return rows, findings
        sizes = torch.sqrt((gradients.square() + residuals.square()).sum(1))
        if text := _exceeded_bound(
            bound, measured.dtype, sizes, compared.parts, measured.layout.numel
        ):
            name, which = compared.locate(int(compared.parts.argmax()))
            find(name, "error", which, text)
    return rows, findings


def _dense_norms(error: Tensor, dots: Tensor, mean: Tensor, dense: Tensor) -> Tensor:
    """Returns the norms of the dense mean, which is average plus error.

    Args:
        error: squared norms of the error.
        dots: products of dense mean and average.
        mean: squared norms of the average.
        dense: squared norms of the dense mean by its sketch.
    """
    summed = (error + 2 * (dots - mean) + mean).clamp_min(0.0)  # below zero by rounding only
    # Both are off by a share, of the error and of the dense mean: with error feedback, the error
    # may be many times the dense mean.
    return torch.where(error < dense, summed, dense).sqrt()


def _rows_of(
    step: int,
    bucket: int,
    names: Sequence[str],
    error: Tensor,
    norm: Tensor,
    mean: Tensor,
    dot: Tensor,
) -> list[VerifiedRow]:
    """Returns the report's rows of some parameters.

    Args:
        step, bucket, names: place.
        error, norm, mean: norms of the error, of the dense mean and of the average.
        dot: the products of dense mean and average.
    """
    none = torch.where(error == 0, 0.0, math.inf)
    errors = torch.where(norm == 0, none, error / norm)
    both = norm * mean
    known = (both > 0) & both.isfinite() & dot.isfinite()
    cosines = torch.where(known, (dot / both).clamp(-1.0, 1.0), math.nan)
    columns = (errors.tolist(), cosines.tolist(), norm.tolist())
    return [VerifiedRow(step, bucket, *row) for row in zip(names, *columns, strict=True)]


def _lost_message(bound: ErrorBound) -> str:
    """Returns the message of an average that is not finite."""
    return f"the average is not finite, though the gradients of all ranks are ({bound.name})"


def _lost_values(mean: Tensor) -> tuple[int, list[int]] | None:
    """Returns the first parameter whose average is not finite, and the ranks that have it.

    Args:
        mean: norms of the averaged gradient, per rank and parameter.
    """
    bad = ~mean.isfinite()
    if not bad.any():
        return None
    position = int(bad.any(0).nonzero()[0])
    return position, bad[:, position].nonzero().view(-1).tolist()


def _exceeded_bound(
    bound: ErrorBound, dtype: torch.dtype, sizes: Tensor, measured: Tensor, numel: int
) -> str | None:
    """Returns a message if a bucket's error exceeds the scheme's bound, else None.

    Args:
        bound: bound of the scheme.
        dtype: dtype of the gradient.
        sizes: norms of each rank's gradient and residual.
        measured: norms of the parts of the error; with feedback, of the lost part of the sum.
        numel: number of entries of the bucket.
    """
    # Differences and sums of numbers near the end of the range are beyond it.
    if bound.rounding is None or not measured.isfinite().all():
        return None
    rounding = max(bound.rounding, 4 * torch.finfo(dtype).eps)
    allowed = rounding * float(sizes.mean()) + math.sqrt(bound.variance) * float(sizes.max())
    # Near the end of the range the distance of two numbers is fixed; every rank's share is rounded.
    ends = torch.finfo(dtype)
    last = max(ends.smallest_normal * ends.eps, _LEAST)
    allowed += (1 + len(sizes) / 2) * last * math.sqrt(numel)
    # Of the whole bucket: blocks and scales that several parameters share make the error of a small
    # one larger than itself.
    total = float(measured.norm())
    if total <= allowed:
        return None
    size = float(sizes.mean())
    reference = "what the ranks have sent" if bound.residual else "the uncompressed mean"
    return (
        f"the average of {bound.name} differs from {reference} by {total / size:.3g} of the "
        f"bucket's gradients, of which most is in this parameter; its traits allow "
        f"{allowed / size:.3g}"
        if size
        else f"the average of {bound.name} has a norm of {total:.3g}, though all gradients are zero"
    )


def _differing_averages(ranks: Tensor, mean: Tensor) -> list[tuple[int, list[int]]]:
    """Returns positions of parameters whose averages differ, with the ranks in the minority.

    An average that is finite nowhere has no bits to compare.
    """
    hashes = ranks[:, ROWS.index("hash")].contiguous().view(torch.int64)
    differ = (hashes != hashes[0]).any(0) & mean.isfinite().any(0)
    positions = differ.nonzero().view(-1).tolist()
    return [(position, minority_ranks(hashes[:, position].tolist())) for position in positions]


def judge_parameters(step: int, names: Sequence[str], hashes: Tensor) -> list[Finding]:
    """Returns a finding for each set of ranks whose parameters differ from those of most ranks.

    A finding names the first of these parameters: all of them drift apart soon.

    Args:
        step: number of the step before which the parameters were hashed.
        names: names of all parameters.
        hashes: hashes of the values, int64 of shape ``(ranks, parameters)``.
    """
    positions: dict[tuple[int, ...], list[int]] = {}
    for position in (hashes != hashes[0]).any(0).nonzero().view(-1).tolist():
        which = tuple(minority_ranks(hashes[:, position].tolist()))
        positions.setdefault(which, []).append(position)
    findings = []
    for which, (first, *more) in positions.items():
        also = f", and {len(more)} more parameters have," * bool(more)
        text = (
            f"before this step it has{also} other bits here than on "
            f"{describe_others(which, len(hashes))}. The ranks train different models; load one "
            f"checkpoint on all of them"
        )
        findings.append(Finding(step, -1, names[first], "parameters differ", which, text))
    return findings
