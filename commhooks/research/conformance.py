"""Runs the laws that every scheme obeys; ``commhooks check my_scheme.py`` runs them on a file.

Each law makes a new scheme and raises :class:`LawBroken` with the input that broke it. The tests of
this package run the same suite on every registered scheme.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from commhooks.core._scheme import Scheme
from commhooks.research._laws import Law, LawBroken, MakeScheme
from commhooks.research._laws_of_a_run import OF_A_RUN
from commhooks.research._laws_of_a_step import OF_A_STEP

__all__ = ["LAWS", "LawBroken", "Verdict", "check_scheme", "laws_of"]

LAWS: dict[str, Law] = {**OF_A_STEP, **OF_A_RUN}


@dataclass(frozen=True)
class Verdict:
    """Holds the outcome of one law.

    Attributes:
        law: key of ``LAWS``.
        error: the input that broke the law, or what the scheme raised; empty if the law holds.
        guide: heading of the paragraph on it in the guide "A scheme of your own".
    """

    law: str
    error: str
    guide: str = ""

    @property
    def holds(self) -> bool:
        """Whether the scheme obeys the law."""
        return not self.error


def laws_of(scheme: Scheme) -> list[str]:
    """Returns the keys of ``LAWS`` that ``scheme`` has to obey, by its traits."""
    return [text for text, law in LAWS.items() if law.is_for(scheme)]


def check_scheme(make: MakeScheme, laws: Iterable[str] | None = None) -> Iterator[Verdict]:
    """Runs laws on a scheme; an exception of the scheme counts as a broken law.

    Args:
        make: returns a new scheme as users get it, with error feedback if it is biased.
        laws: keys of ``LAWS``; by default those of :func:`laws_of`.

    Raises:
        ValueError: the scheme does not exchange anything.

    Example:
        >>> all(verdict.holds for verdict in check_scheme(lambda: make("powersgd")))
        True
    """
    if not make().traits.averages:
        raise ValueError("check_scheme: the laws are about schemes that average over ranks")
    for text in laws_of(make()) if laws is None else laws:
        error = ""
        try:
            LAWS[text].check(make)
        except LawBroken as broken:
            error = str(broken)
        except Exception as raised:  # whatever a user's code raises is a verdict on it
            error = f"{type(raised).__name__}: {raised}"
        yield Verdict(text, error, LAWS[text].guide)
