"""Prints the fabrics that predictions know by name (``--list-fabrics``)."""

from __future__ import annotations

from collections.abc import Iterator

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from commhooks.predict.fabric import PRESETS, Link

__all__ = ["preset_rows", "print_presets"]


def preset_rows() -> Iterator[tuple[str, str, str, str]]:
    """Yields name, link between nodes, link inside of one, and source of each preset."""
    for one in PRESETS.values():
        inside = ""
        if one.inside is not None:
            inside = f"{one.ranks_per_node} ranks, {_words(one.inside)}"
            if one.multicast is not None:
                inside += f", switch {one.multicast / 1e9:.3g} GB/s"
        yield one.name, _words(one.between), inside, one.source


def _words(link: Link) -> str:
    chunks = f", {1e6 * link.chunk_s:.3g} us per chunk" if link.chunk_s else ""
    long = link.latency >= 1e-3
    latency = f"{1e3 * link.latency:.3g} ms" if long else f"{1e6 * link.latency:.3g} us"
    return f"{latency}, {link.bandwidth / 1e9:.4g} GB/s{chunks}"


def print_presets(wanted: bool) -> None:
    """Prints all presets and ends the command, if that is wanted: the callback of an option."""
    if not wanted:
        return
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 0, 0, 1))
    table.add_column("fabric", no_wrap=True)
    for column in ("between nodes", "inside a node", "source"):
        table.add_column(column, overflow="fold")
    for row in preset_rows():
        table.add_row(*map(escape, row))
    Console().print(table)
    raise typer.Exit
