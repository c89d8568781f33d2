"""Chooses a scheme for each parameter from recorded gradients, within a budget of bits or error."""

from __future__ import annotations

import glob
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from commhooks.core._layout import Layout
from commhooks.core._scheme import Scheme
from commhooks.core._settings import check_value, shown
from commhooks.research._simulation import Simulation
from commhooks.research.trace import Trace
from commhooks.wrappers._base import Coalesced
from commhooks.wrappers._feedback import without_feedback
from commhooks.wrappers._per_parameter import PerParameter, Rule
from commhooks.wrappers._schedules import DelayedStart
from ddp_core import needs

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Allocation", "allocate"]

# Steps on the same gradients; the last one counts. The first factors of low-rank schemes are
# random: each further step on the same matrix is one more power iteration.
_WARM_UP = 2


@dataclass(frozen=True)
class Allocation:
    """Holds the choice that :func:`allocate` made.

    Attributes:
        scheme: a scheme for each parameter, to register.
        table: one row per parameter: entries, scheme, payload bits per entry, relative error.
        bits: payload bits per entry over all parameters.
        error: relative squared error of the average over all parameters, of one step without
            feedback.
    """

    scheme: PerParameter
    table: pd.DataFrame
    bits: float
    error: float


@dataclass(frozen=True)
class _Choice:
    """Holds the cost and the error of one candidate on one parameter."""

    scheme: Scheme
    nbytes: float
    error: float  # squared


def allocate(
    gradients: Trace | Iterable[tuple[Layout, Sequence[Tensor]]],
    candidates: Sequence[Scheme],
    *,
    bits: float | None = None,
    max_error: float | None = None,
) -> Allocation:
    """Chooses one of the candidates for each parameter.

    Runs each candidate on the recorded gradients of each parameter alone. Then starts from the
    cheapest candidate everywhere and takes the change that lowers the error most per byte, along
    the lower hull of error over bytes, until the budget is met.

    Args:
        gradients: a trace, or for each step the layout and the flat gradients of all ranks.
        candidates: schemes, such as one scheme with several ranks or numbers of bits.
        bits: minimizes the error with at most this many payload bits per entry.
        max_error: minimizes the bits with at most this relative squared error of the average.

    Raises:
        ValueError: both budgets or none, no candidates, a parameter whose average is not finite
            with any candidate, or a budget that no choice meets.

    Example:
        >>> allocation = allocate(Trace("trace"), [make("powersgd", rank=r) for r in (1, 2, 4, 8)],
        ...                       bits=1.0)
        >>> hook = register(ddp_model, allocation.scheme)

    Reference: Markov et al., L-GreCo, 2023 (the problem; its solution is another).
    """
    if (bits is None) == (max_error is None):
        raise ValueError("allocate(bits=..., max_error=...): one of the two is given")
    bits = check_value("allocate", "bits", bits, float | None)
    max_error = check_value("allocate", "max_error", max_error, float | None)
    if isinstance(candidates, (str, Scheme)) or not candidates:
        raise ValueError(
            f"allocate(candidates): a list of schemes, one scheme at least, got {shown(candidates)}"
        )
    for candidate in candidates:
        check_value("allocate", "candidates", candidate, Scheme)
    # The table is made last: without this import a missing pandas shows after minutes of work.
    with needs("allocate(...)", "pandas"):
        import pandas  # noqa: F401
    steps = _steps(gradients)
    layout, total = steps[0][0], 0.0
    for _, grads in steps:
        total += float(torch.stack(list(grads)).double().mean(0).square().sum())
    # Each parameter alone, so that errors and bytes of parameters add up, whatever is chosen for
    # the others. A run differs a little: parameters with one scheme share blocks in a bucket.
    hulls = [_hull(_tried(index, steps, candidates)) for index in range(len(layout))]
    entries = sum(layout.sizes)
    room = float("inf") if bits is None else bits * entries / 8
    goal = 0.0 if max_error is None else max_error * total
    levels = _filled(hulls, room, goal)
    chosen = [hull[level] for hull, level in zip(hulls, levels, strict=True)]
    nbytes, lost = sum(choice.nbytes for choice in chosen), sum(choice.error for choice in chosen)
    if nbytes > room:
        raise ValueError(
            f"allocate(bits={bits}): the candidates need {8 * nbytes / entries:.3g} bits per entry "
            f"at least; add a cheaper candidate"
        )
    if max_error is not None and lost > goal:
        least = lost / total if total else math.inf
        raise ValueError(
            f"allocate(max_error={max_error}): the candidates leave {least:.3g} at least; add a "
            f"more exact candidate"
        )
    relative = lost / total if total else 0.0
    return Allocation(
        _as_rules(layout, chosen), _table(layout, chosen, steps), 8 * nbytes / entries, relative
    )


def _steps(
    gradients: Trace | Iterable[tuple[Layout, Sequence[Tensor]]],
) -> list[tuple[Layout, Sequence[Tensor]]]:
    if isinstance(gradients, Trace):
        return [gradients.gradients(step) for step in gradients.steps]
    if isinstance(gradients, (str, Path)):
        raise TypeError(f"allocate(gradients): of a folder, give Trace({str(gradients)!r})")
    steps = list(gradients)
    if not steps:
        raise ValueError("allocate(gradients): one step at least")
    return steps


def _tried(
    index: int, steps: Sequence[tuple[Layout, Sequence[Tensor]]], candidates: Sequence[Scheme]
) -> list[_Choice]:
    """Runs each candidate on one parameter; returns payload bytes per step and the summed error.

    Leaves out a candidate whose average is not finite in some step.
    """
    layout = steps[0][0]
    name, shape = layout.names[index], layout.shapes[index]
    begin, end = layout.offsets[index], layout.offsets[index + 1]
    choices = []
    for scheme in candidates:
        lost = nbytes = 0.0
        for _, grads in steps:
            parts = [grad[begin:end].float() for grad in grads]
            # Without feedback, and new for each step: a residual would carry the error of one
            # recorded step to the next, and between two recorded steps training went on.
            ranks = Simulation(_bare(scheme), {name: shape}, world_size=len(parts))
            for _ in range(_WARM_UP):
                ranks.requests.clear()
                mean = ranks.step(parts)[0]
            exact = torch.stack(parts).double().mean(0)
            lost += float((mean.double() - exact).square().sum())
            nbytes += sum(size for _, size in ranks.requests) / len(steps)
        # An infinite error would stay in every sum: the budget of error could never be met.
        if math.isfinite(lost):
            choices.append(_Choice(scheme, nbytes, lost))
    if not choices:
        raise ValueError(
            f"allocate(candidates): no candidate gives a finite average of parameter {name!r}: its "
            f"recorded gradients are not finite, or overflow in all of {shown(list(candidates))}; "
            f"leave such steps out, or add a candidate of a wider range"
        )
    return choices


def _bare(scheme: Scheme) -> Scheme:
    """Returns the scheme without feedback, and without the dense steps before it starts."""
    while isinstance(scheme, (DelayedStart, Coalesced)):
        scheme = scheme.scheme
    return without_feedback(scheme)


def _hull(choices: Sequence[_Choice]) -> list[_Choice]:
    """Returns the choices on the lower hull of error over bytes, cheapest first."""
    hull: list[_Choice] = []
    for choice in sorted(choices, key=lambda choice: (choice.nbytes, choice.error)):
        # Among equal bytes the first has the least error, so no two points of the hull have equal
        # bytes, and a slope never divides by zero.
        if hull and choice.error >= hull[-1].error:
            continue
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-1], choice):
            hull.pop()
        hull.append(choice)
    return hull


def _slope(a: _Choice, b: _Choice) -> float:
    return (b.error - a.error) / (b.nbytes - a.nbytes)


def _filled(hulls: Sequence[Sequence[_Choice]], room: float, goal: float) -> list[int]:
    """Returns an index into each hull: applies the steepest changes until ``goal`` is met.

    Args:
        hulls: the choices for each parameter.
        room: payload bytes of all parameters together.
        goal: squared error of all parameters together.
    """
    taken = [0] * len(hulls)
    used = sum(hull[0].nbytes for hull in hulls)
    lost = sum(hull[0].error for hull in hulls)
    # Slopes rise along a hull, so the changes of one parameter come in their order.
    changes = sorted(
        (_slope(a, b), index, level)
        for index, hull in enumerate(hulls)
        for level, (a, b) in enumerate(pairwise(hull))
    )
    for _, index, level in changes:
        if lost <= goal:
            break
        old, new = hulls[index][level], hulls[index][level + 1]
        # A change that does not fit ends its hull: later ones start from its result. Smaller
        # changes of other parameters may still fit.
        if taken[index] == level and used + new.nbytes - old.nbytes <= room:
            taken[index] = level + 1
            used += new.nbytes - old.nbytes
            lost += new.error - old.error
    return taken


def _as_rules(layout: Layout, chosen: Sequence[_Choice]) -> PerParameter:
    """Returns rules: the most frequent choice is the default, others are listed by name."""
    schemes = [choice.scheme for choice in chosen]
    # dict.fromkeys keeps the order of the parameters, so that a tie is the same on every rank.
    default = max(dict.fromkeys(schemes), key=schemes.count)
    rules = [
        Rule(scheme, name=glob.escape(name))  # a rule's name is a pattern
        for name, scheme in zip(layout.names, schemes, strict=True)
        if scheme != default
    ]
    return PerParameter(rules, default=default)


def _table(
    layout: Layout, chosen: Sequence[_Choice], steps: Sequence[tuple[Layout, Sequence[Tensor]]]
) -> pd.DataFrame:
    import pandas as pd

    norms = torch.zeros(len(layout), dtype=torch.float64)
    for _, grads in steps:
        mean = torch.stack(list(grads)).double().mean(0)
        norms += torch.stack([part.square().sum() for part in mean.split(layout.sizes)])
    rows = zip(layout.names, layout.sizes, chosen, norms.tolist(), strict=True)
    table: pd.DataFrame = pd.DataFrame(
        {
            "parameter": name,
            "entries": size,
            "scheme": str(choice.scheme),
            "bits": 8 * choice.nbytes / max(1, size),
            "error": choice.error / norm if norm else 0.0,
        }
        for name, size, choice, norm in rows
    )
    return table
