"""A scheme for each parameter, chosen for a budget of bits or of error from recorded gradients."""

from __future__ import annotations

import glob
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from commhooks.core.layout import Layout
from commhooks.core.scheme import Scheme
from commhooks.core.settings import fitting, shown
from commhooks.research.simulation import Simulation
from commhooks.research.trace import Trace
from commhooks.wrappers.feedback import without_feedback
from commhooks.wrappers.per_parameter import PerParameter, Rule
from ddp_core import needs

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Allocation", "allocate"]

_WARM_UP = 2  # steps on the same gradients, after which factors are warm


@dataclass(frozen=True)
class Allocation:
    """What :func:`allocate` chose.

    Attributes:
        scheme: a scheme for each parameter, to register.
        table: a row per parameter: entries, scheme, bits an entry, relative error.
        bits: bits an entry of all parameters together.
        error: relative squared error of the average of all parameters together, of one step
            without feedback.
    """

    scheme: PerParameter
    table: pd.DataFrame
    bits: float
    error: float


@dataclass(frozen=True)
class _Choice:
    scheme: Scheme
    nbytes: float
    error: float  # squared


def allocate(
    gradients: Trace | Iterable[tuple[Layout, Sequence[Tensor]]],
    candidates: Sequence[Scheme],
    *,
    bits: float | None = None,
    error: float | None = None,
) -> Allocation:
    """Chooses one of the candidates for each parameter.

    Each is tried on the recorded gradients of each parameter by itself. Along the lower hull of
    error over bytes, what lowers the error most per byte is taken first, until the budget is met.

    Args:
        gradients: a trace, or per step the layout and the flat gradients of all ranks.
        candidates: schemes, such as one scheme with several ranks or numbers of bits.
        bits: at most so many bits an entry, with the least error.
        error: at most this relative squared error of the average, with the fewest bits.

    Raises:
        ValueError: not one budget, no candidates, or a budget that no choice meets.

    Example:
        >>> found = allocate(Trace("trace"), [make("powersgd", rank=r) for r in (1, 2, 4, 8)],
        ...                  bits=1.0)
        >>> hook = register(ddp_model, found.scheme)

    Reference: Markov et al., L-GreCo, 2023 (the problem).
    """
    if (bits is None) == (error is None):
        raise ValueError("allocate(bits=..., error=...): one of the two is given")
    bits = fitting("allocate", "bits", bits, float | None)
    error = fitting("allocate", "error", error, float | None)
    if isinstance(candidates, (str, Scheme)) or not candidates:
        raise ValueError(
            f"allocate(candidates): a list of schemes, one scheme at least, got {shown(candidates)}"
        )
    for one in candidates:
        fitting("allocate", "candidates", one, Scheme)
    with needs("allocate(...)", "pandas"):  # the table comes last, after minutes perhaps
        import pandas  # noqa: F401
    steps = _steps(gradients)
    layout, total = steps[0][0], 0.0
    for _, grads in steps:
        total += float(torch.stack(list(grads)).double().mean(0).square().sum())
    hulls = [_hull(_tried(index, steps, candidates)) for index in range(len(layout))]
    entries = sum(layout.sizes)
    room = float("inf") if bits is None else bits * entries / 8
    goal = 0.0 if error is None else error * total
    taken = _filled(hulls, room, goal)
    chosen = [hull[level] for hull, level in zip(hulls, taken, strict=True)]
    nbytes, lost = sum(one.nbytes for one in chosen), sum(one.error for one in chosen)
    if nbytes > room:
        raise ValueError(
            f"allocate(bits={bits}): the candidates need {8 * nbytes / entries:.3g} bits an entry "
            f"at least; give a cheaper one"
        )
    if error is not None and lost > goal:
        raise ValueError(
            f"allocate(error={error}): the candidates leave {lost / total:.3g} at least; give a "
            f"better one"
        )
    return Allocation(
        _as_rules(layout, chosen), _table(layout, chosen, steps), 8 * nbytes / entries, lost / total
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
    """What each candidate does to one parameter: payload bytes a step, error of all steps."""
    layout = steps[0][0]
    name, shape = layout.names[index], layout.shapes[index]
    begin, end = layout.offsets[index], layout.offsets[index + 1]
    choices = []
    for scheme in candidates:
        lost = nbytes = 0.0
        for _, grads in steps:
            own = [grad[begin:end].float() for grad in grads]
            ranks = Simulation(without_feedback(scheme), {name: shape}, world_size=len(own))
            for _ in range(_WARM_UP):
                ranks.requests.clear()
                mean = ranks.step(own)[0]
            exact = torch.stack(own).double().mean(0)
            lost += float((mean.double() - exact).square().sum())
            nbytes += sum(size for _, size in ranks.requests) / len(steps)
        choices.append(_Choice(scheme, nbytes, lost))
    return choices


def _hull(choices: Sequence[_Choice]) -> list[_Choice]:
    """Those on the lower hull of error over bytes, cheapest first."""
    hull: list[_Choice] = []
    for one in sorted(choices, key=lambda one: (one.nbytes, one.error)):
        if hull and one.error >= hull[-1].error:
            continue
        if hull and one.nbytes == hull[-1].nbytes:
            hull.pop()
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-1], one):
            hull.pop()
        hull.append(one)
    return hull


def _slope(a: _Choice, b: _Choice) -> float:
    return (b.error - a.error) / (b.nbytes - a.nbytes)


def _filled(hulls: Sequence[Sequence[_Choice]], room: float, goal: float) -> list[int]:
    """Which of each hull's choices is taken: the steepest steps that fit, until the goal is met."""
    taken = [0] * len(hulls)
    used = sum(hull[0].nbytes for hull in hulls)
    lost = sum(hull[0].error for hull in hulls)
    steps = sorted(
        (_slope(a, b), index, level)
        for index, hull in enumerate(hulls)
        for level, (a, b) in enumerate(pairwise(hull))
    )
    for _, index, level in steps:
        if lost <= goal:
            break
        old, new = hulls[index][level], hulls[index][level + 1]
        if taken[index] == level and used + new.nbytes - old.nbytes <= room:
            taken[index] = level + 1
            used += new.nbytes - old.nbytes
            lost += new.error - old.error
    return taken


def _as_rules(layout: Layout, chosen: Sequence[_Choice]) -> PerParameter:
    """The most frequent choice is the default, the others stand by name."""
    schemes = [one.scheme for one in chosen]
    default = max(dict.fromkeys(schemes), key=schemes.count)
    rules = [
        Rule(scheme, name=glob.escape(name))
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
            "scheme": str(one.scheme),
            "bits": 8 * one.nbytes / max(1, size),
            "error": one.error / norm if norm else 0.0,
        }
        for name, size, one, norm in rows
    )
    return table
