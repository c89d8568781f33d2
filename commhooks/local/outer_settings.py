"""The settings of DiLoCo's exchanges and of its outer optimizer, and their laws."""

from __future__ import annotations

from typing import NamedTuple

from commhooks.core.settings import fitting

__all__ = ["OuterSettings", "checked"]


class OuterSettings(NamedTuple):
    """As :class:`commhooks.DiLoCo` takes them; the ranks agree on them."""

    every: int
    fragments: int
    delay: int
    mix: float
    lr: float
    momentum: float
    nesterov: bool


def checked(
    *,
    every: int,
    fragments: int,
    delay: int,
    mix: float,
    lr: float,
    momentum: float,
    nesterov: bool,
) -> OuterSettings:
    """The settings, if they are of the right types and fit together.

    Raises:
        TypeError, ValueError: they are not, or do not.
    """
    every, fragments, delay = (
        fitting("DiLoCo", name, value, int)
        for name, value in (("every", every), ("fragments", fragments), ("delay", delay))
    )
    lr, momentum, mix = (
        fitting("DiLoCo", name, value, float)
        for name, value in (("lr", lr), ("momentum", momentum), ("mix", mix))
    )
    nesterov = fitting("DiLoCo", "nesterov", nesterov, bool)
    for name, value in (("every", every), ("fragments", fragments)):
        if value < 1:
            raise ValueError(f"DiLoCo({name}=...) is 1 or more, got {value!r}")
    if every % fragments:
        raise ValueError(
            f"DiLoCo(every=..., fragments=...): every is a multiple of fragments, "
            f"got {every} and {fragments}"
        )
    if not 0 <= delay < every // fragments:
        raise ValueError(
            f"DiLoCo(delay=...): 0 <= delay < every / fragments = {every // fragments}, "
            f"got {delay!r}"
        )
    if not 0 <= mix <= 1 or (mix and not delay):
        raise ValueError(f"DiLoCo(mix=...): 0 <= mix <= 1, and 0 without a delay, got {mix!r}")
    if not 0 <= momentum < 1:
        raise ValueError(f"DiLoCo(momentum=...): 0 <= momentum < 1, got {momentum!r}")
    if not lr > 0:
        raise ValueError(f"DiLoCo(lr=...) is above 0, got {lr!r}")
    return OuterSettings(every, fragments, delay, mix, lr, momentum, nesterov)
