"""Says how far a command is: a bar in a terminal, now and then a line in a log."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

import typer
from rich.console import Console
from rich.progress import track

__all__ = ["EVERY_S", "tracked"]

T = TypeVar("T")
EVERY_S = 10.0  # between two lines of a log


def tracked(items: Iterable[T], title: str, total: int) -> Iterator[T]:
    """Yields ``items`` and writes to stderr how many of them are done, and how long the rest takes.

    Args:
        items: one takes a noticeable time.
        title: what they belong to.
        total: number of them.
    """
    console = Console(stderr=True)
    if console.is_terminal:
        yield from track(items, title, total, console=console)
        return
    begin = last = time.monotonic()
    for done, value in enumerate(items):
        yield value
        now = time.monotonic()
        if now - last >= EVERY_S and done + 1 < total:
            remaining_s = (now - begin) / (done + 1) * (total - done - 1)
            typer.echo(f"{title}: {done + 1} of {total}, about {remaining_s:.0f} s to go", err=True)
            last = now
