"""Runs the laws that every scheme obeys; ``commhooks check my_scheme.py`` runs them on a file.

Each law makes a new scheme and raises :class:`LawBroken` with the input that broke it. The tests of
this package run the same suite on every registered scheme.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from commhooks.core._scheme import Scheme
from commhooks.research._laws import (
    LATE,
    SHAPES,
    Law,
    LawBroken,
    MakeScheme,
    from_step,
    gradients,
    in_words,
)
from commhooks.research._laws_of_a_run import OF_A_RUN
from commhooks.research._laws_of_a_step import FIRST, OF_A_STEP
from commhooks.research._simulation import Simulation
from commhooks.wrappers._base import Coalesced
from commhooks.wrappers._schedules import DelayedStart, PeriodicDense, Schedule
from ddp_core import Collective
from ddp_core.exchange._errors import raised_in

__all__ = ["LAWS", "LawBroken", "Verdict", "check_scheme", "exemptions_of", "laws_of"]

LAWS: dict[str, Law] = {**OF_A_STEP, **OF_A_RUN}


@dataclass(frozen=True)
class Verdict:
    """Holds the outcome of one law.

    Attributes:
        law: key of ``LAWS``.
        error: the input that broke the law, or what the scheme raised and where; empty if the law
            holds.
        guide: heading of the paragraph on it in the guide "A scheme of your own".
        is_last: the scheme does not run at all, so that no other law is checked.
    """

    law: str
    error: str
    guide: str = ""
    is_last: bool = False

    @property
    def holds(self) -> bool:
        """Whether the scheme obeys the law."""
        return not self.error


def laws_of(scheme: Scheme) -> list[str]:
    """Returns the keys of ``LAWS`` that ``scheme`` has to obey, by its traits."""
    return [text for text, law in LAWS.items() if not law.exempts(scheme)]


def exemptions_of(scheme: Scheme) -> dict[str, int]:
    """Returns why laws are not for ``scheme``, and of how many each reason is true."""
    return Counter(reason for law in LAWS.values() if (reason := law.exempts(scheme)))


def check_scheme(make: MakeScheme, laws: Iterable[str] | None = None) -> Iterator[Verdict]:
    """Runs laws on a scheme; an exception of the scheme counts as a broken law.

    A scheme that sends something else after its first steps obeys them in both.

    Args:
        make: returns a new scheme as users get it, with error feedback if it is biased.
        laws: keys of ``LAWS``; by default those of :func:`laws_of`, of which the first one is the
            last if the scheme raises an exception in it.

    Raises:
        ValueError: the scheme does not exchange anything.

    Example:
        >>> all(verdict.holds for verdict in check_scheme(lambda: make("powersgd")))
        True
    """
    if not make().traits.averages:
        raise ValueError("check_scheme: the laws are about schemes that average over ranks")
    late: bool | None = None
    for text in laws_of(make()) if laws is None else laws:
        error, since, is_last = "", "", False
        try:
            LAWS[text].check(lambda: _running(make(), 0))
            since = f"from step {LATE:,} on: "
            late = _changes(make) if late is None else late
            if late:
                with from_step(LATE):
                    LAWS[text].check(lambda: _running(make(), LATE))
        except LawBroken as broken:
            error = f"{since}{broken}"
        except Exception as raised:  # whatever a user's code raises is a verdict on it
            error = f"{since}{type(raised).__name__}: {raised}{_place(raised)}"
            is_last = laws is None and text == FIRST
        yield Verdict(text, error, LAWS[text].guide, is_last)
        if is_last:
            return


def _running(scheme: Scheme, step: int) -> Scheme:
    """Returns what runs in a step: laws look for feedback on the outside."""
    while True:
        if isinstance(scheme, Coalesced | PeriodicDense):
            scheme = scheme.scheme
        elif isinstance(scheme, Schedule):
            scheme = scheme.at(step)
        elif isinstance(scheme, DelayedStart):
            scheme = scheme.before if step < scheme.start_step else scheme.scheme
        else:
            return scheme


class _Signatures(Simulation):
    """Records what rank 0 asks for, by kind, shape and dtype."""

    def __init__(self, scheme: Scheme, first_step: int) -> None:
        super().__init__(scheme, SHAPES, world_size=2)
        self.seen: set[object] = set()
        for engine in self.engines:
            engine.step = first_step
        for step in range(4):  # some learn in the first two, and some take turns
            self.step(gradients(2, step))

    def _record(self, request: Collective, rank: int) -> None:
        if not rank:
            self.seen.add(request.signature())


def _changes(make: MakeScheme) -> bool:
    """Whether a scheme sends something else after all warm-ups."""
    return not _Signatures(make(), LATE).seen <= _Signatures(make(), 0).seen


def _place(raised: Exception) -> str:
    """Returns where a scheme raised an exception: its line, and the shapes and ranks."""
    line = raised_in(raised)
    words = [line] if line else []
    for frame, _ in traceback.walk_tb(raised.__traceback__):
        ranks = frame.f_locals.get("self")
        # A step of ranks is between the law and the scheme.
        if isinstance(ranks, Simulation) and frame.f_code is Simulation.step.__code__:
            shapes = ", ".join(str(tuple(shape)) for shape in ranks.layout.shapes)
            words += [f"shapes {shapes}", in_words(len(ranks.engines))]
            break
    return f" ({'; '.join(words)})" if words else ""
