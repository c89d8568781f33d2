"""Prints tables whole, also where the terminal is narrower."""

from __future__ import annotations

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

__all__ = ["print_table"]

_ANY = 10**5  # columns in which every cell has room
_FOLDED = 10  # letters of a word that may be folded


def print_table(console: Console, table: Table) -> None:
    """Prints a table whose lines are long, rather than cut, where the terminal is too narrow.

    A column has room for its longest word, or for its longest line if it does not wrap; one that
    folds words has room for some letters.
    """
    room = console.options.update(width=_ANY)
    for column in table.columns:
        cells = [Measurement.get(console, room, cell) for cell in (column.header, *column.cells)]
        least = max(cell.maximum if column.no_wrap else cell.minimum for cell in cells)
        column.min_width = min(least, _FOLDED) if column.overflow == "fold" else least
    width = Measurement.get(console, room, table).minimum
    if width > console.width:
        table.width = width  # in less, rich shortens columns, or leaves them out
    console.print(table, crop=False)
