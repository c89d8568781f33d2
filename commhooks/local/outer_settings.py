"""Checks the settings of DiLoCo's exchanges and of its outer optimizer."""

from __future__ import annotations

from typing import NamedTuple

from commhooks.core.settings import fitting

__all__ = ["OuterSettings", "checked"]


class OuterSettings(NamedTuple):
    """Holds the settings of :class:`commhooks.DiLoCo` on which the ranks have to agree."""

    every: int
    fragments: int
    delay: int
    lr: float
    momentum: float
    nesterov: bool


def checked(
    *,
    every: int,
    fragments: int,
    delay: int,
    lr: float,
    momentum: float,
    nesterov: bool,
) -> OuterSettings:
    """Returns the settings after checking them.

    Raises:
        TypeError: a setting has another type.
        ValueError: a setting is out of range, or does not fit another one.
    """
    every, fragments, delay = (
        fitting("DiLoCo", name, value, int)
        for name, value in (("every", every), ("fragments", fragments), ("delay", delay))
    )
    lr, momentum = (
        fitting("DiLoCo", name, value, float)
        for name, value in (("lr", lr), ("momentum", momentum))
    )
    nesterov = fitting("DiLoCo", "nesterov", nesterov, bool)
    for name, value in (("every", every), ("fragments", fragments)):
        if value < 1:
            raise ValueError(f"DiLoCo({name}=...) is 1 or more, got {value!r}")
    # A fragment is sent every ``every // fragments`` steps, so that each has its turn in ``every``.
    if every % fragments:
        raise ValueError(
            f"DiLoCo(every=..., fragments=...): every is a multiple of fragments, "
            f"got {every} and {fragments}"
        )
    # Each fragment is applied before the next one is sent: one exchange at a time is under way.
    if not 0 <= delay < every // fragments:
        raise ValueError(
            f"DiLoCo(delay=...): 0 <= delay < every / fragments = {every // fragments}, "
            f"got {delay!r}"
        )
    if not 0 <= momentum < 1:
        raise ValueError(f"DiLoCo(momentum=...): 0 <= momentum < 1, got {momentum!r}")
    if not lr > 0:  # NaN is refused, too
        raise ValueError(f"DiLoCo(lr=...) is above 0, got {lr!r}")
    return OuterSettings(every, fragments, delay, lr, momentum, nesterov)
