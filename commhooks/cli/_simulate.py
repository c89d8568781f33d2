"""Runs ``commhooks simulate``: predicts steps of schemes and where each stops paying."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from commhooks.cli._arguments import (
    check_folders,
    fabrics_of,
    heading,
    listed,
    note_of,
    numbers_of,
    schemes_of,
    short,
    workload_of,
)
from commhooks.cli._table import print_table
from commhooks.predict._device import DEFAULT_DEVICE
from commhooks.predict._device import device as device_of
from commhooks.predict._fabric import PRESETS, Link
from commhooks.predict._models import MODELS
from commhooks.predict._simulate import (
    BASELINE,
    MARGIN,
    Comparison,
    Row,
    check_format,
    compare,
    draw,
    write_csv,
)
from commhooks.predict._step import MAX_RANKS

__all__ = ["MODELS", "Options", "preset_rows", "print_presets", "simulate"]


def preset_rows() -> Iterator[tuple[str, str, str, str]]:
    """Yields name, link between nodes, link inside of one, and source of each preset."""
    for preset in PRESETS.values():
        inside = ""
        if preset.inside is not None:
            inside = f"{preset.ranks_per_node} ranks, {_words(preset.inside)}"
            if preset.multicast is not None:
                inside += f", switch {preset.multicast / 1e9:.3g} GB/s"
        yield preset.name, _words(preset.between), inside, preset.source


def _words(link: Link) -> str:
    chunks = f", {1e6 * link.chunk_s:.3g} us per chunk" if link.chunk_s else ""
    long = link.latency >= 1e-3
    latency = f"{1e3 * link.latency:.3g} ms" if long else f"{1e6 * link.latency:.3g} us"
    return f"{latency}, {link.bandwidth / 1e9:.4g} GB/s{chunks}"


def print_presets(wanted: bool) -> None:
    """Prints all presets and ends the command; the callback of an option."""
    if not wanted:
        return
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 0, 0, 1))
    table.add_column("network", no_wrap=True)
    for column in ("between nodes", "inside a node", "source"):
        table.add_column(column, overflow="fold")
    for row in preset_rows():
        table.add_row(*map(escape, row))
    print_table(Console(), table)
    raise typer.Exit


# ---- commhooks simulate


@dataclass(frozen=True)
class Options:
    """Holds the arguments of the command as given.

    Attributes:
        model: a built-in name, or ``FILE.py:FUNCTION``.
        timeline: file of :func:`commhooks.predict.save_workload`, instead of a model.
        schemes, ranks, fabric: lists with commas.
        device: a name; None: ``DEFAULT_DEVICE``.
        batch: samples of a rank's pass.
        accumulate: forward and backward passes of a step.
        bucket_mb: MiB at which a bucket is full; None: as without ``bucket_cap_mb``.
        csv, plot: files to write.
    """

    model: str | None
    timeline: Path | None
    schemes: str
    ranks: str
    fabric: str
    device: str | None
    batch: int | None
    accumulate: int
    bucket_mb: float | None
    csv: Path | None
    plot: Path | None


def simulate(options: Options) -> None:
    """Prints a table per fabric, and writes the requested files.

    Raises:
        typer.BadParameter: an argument is wrong.
    """
    check_folders(options.csv, options.plot)
    if options.csv and options.plot and options.csv.resolve() == options.plot.resolve():
        raise typer.BadParameter(
            f"--csv and --plot are two files, got {options.plot} for both: name another one"
        )
    try:
        if options.plot is not None:
            check_format(options.plot)  # now: a wrong ending costs no prediction
        device = device_of(options.device or DEFAULT_DEVICE)
        fabrics, ranks = fabrics_of(options.fabric), numbers_of(options.ranks)
        workload, samples = workload_of(
            options.model, options.timeline, options.batch, device, accumulate=options.accumulate
        )
        comparison = compare(
            workload,
            schemes_of(listed("--schemes", options.schemes)),
            ranks=ranks,
            fabrics=fabrics,
            device=device,
            cap_mb=options.bucket_mb,
        )
    except ValueError as error:  # PredictionError is reported for all commands
        raise typer.BadParameter(str(error)) from error
    # Tables.
    console = Console(markup=False)  # names come from files
    default = "" if options.device else f" (--device {DEFAULT_DEVICE} is the default)"
    console.print(heading(workload, samples, device.name + default), highlight=False)
    one_node = [max(ranks) <= fabric.ranks_per_node for fabric in fabrics]
    for index, fabric in enumerate(fabrics):
        rows = [row for row in comparison.rows() if row.fabric == fabric.name]
        console.print(f"\n{fabric.name}", style="bold", highlight=False)
        print_table(console, _table(rows, one_node[index]))
        console.print("\n".join(_where(comparison, index, one_node[index])), highlight=False)
        if note := note_of(fabric, max(ranks)):
            console.print(note, highlight=False)
    between = not all(one_node)
    console.print(
        f"\nexposed: not overlapped with backward. speed-up: over bf16.\n"
        f"sent: by each rank{', and by a node to other nodes' * between}.\n"
        f"faster than bf16: by {100 * MARGIN:.0f} % of a step or more"
        f"{', at these bandwidths between nodes' * between}.",
        highlight=False,
    )
    # Files.
    if options.csv is not None:
        write_csv(comparison, options.csv)
        typer.echo(f"wrote {options.csv}")
    if options.plot is not None:
        draw(comparison, options.plot)
        typer.echo(f"wrote {options.plot}")


# ---- results


def _table(rows: Iterable[Row], one_node: bool) -> Table:
    """Returns rows as a table; of one node without the columns on links between nodes."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 0, 0, 1))
    table.add_column("ranks", justify="right")
    table.add_column("scheme", no_wrap=True)
    columns = ["step|[ms]", "exposed|[ms]", "speed-up|", "sent|[MB]"]
    for column in columns + ([] if one_node else ["by node|[MB]", "faster|than|bf16 at|[Gbit/s]"]):
        table.add_column(column.replace("|", "\n"), justify="right", no_wrap=True)
    before = None
    for row in rows:
        if before not in (None, row.ranks):
            table.add_section()
        table.add_row(
            "" if row.ranks == before else f"{row.ranks:,}",
            row.scheme,
            short(1e3 * row.step_s),
            short(1e3 * row.exposed_s),
            f"{row.speedup:.2f}",
            short(row.rank_nbytes / 1e6),
            *([] if one_node else [short(row.link_nbytes / 1e6), _where_paying(row)]),
        )
        before = row.ranks
    return table


def _where_paying(row: Row) -> str:
    """Returns the bandwidths at which a scheme pays, in Gbit/s."""
    if row.scheme == BASELINE:
        return ""
    if math.isnan(row.pays_from):
        return "nowhere"
    low, high = (short(8 * bandwidth / 1e9) for bandwidth in (row.pays_from, row.pays_to))
    if math.isinf(row.pays_to):
        return f"over {low}" if row.pays_from else "anywhere"
    return f"{low} to {high}" if row.pays_from else f"below {high}"


def _where(comparison: Comparison, fabric: int, one_node: bool) -> list[str]:
    """Returns with how many ranks each scheme pays; of one node with those that it has."""
    name, lines = comparison.fabrics[fabric].name, []
    most = comparison.fabrics[fabric].ranks_per_node if one_node else MAX_RANKS
    known = [size for size in comparison.sizes if size <= most]
    for scheme in comparison.schemes:
        if scheme == BASELINE:
            continue
        sizes = [size for size in comparison.paying_sizes(scheme, fabric) if size <= most]
        if not sizes:
            ranks = f"2 to {most} ranks" if one_node else "any number of ranks"
            lines.append(f"{scheme}: on {name} bf16 is as fast, or faster, with {ranks}")
        else:
            ranks = _ranges(sizes, known)
            lines.append(f"{scheme}: faster than bf16 on {name} with {ranks} ranks")
    return lines


def _ranges(sizes: Sequence[int], of: Sequence[int]) -> str:
    """Returns numbers as ranges of neighbours in ``of``: "2 to 8 and 64"."""
    parts: list[list[int]] = []
    for size in sizes:
        if parts and of.index(size) == of.index(parts[-1][-1]) + 1:
            parts[-1].append(size)
        else:
            parts.append([size])
    words = [f"{part[0]:,} to {part[-1]:,}" if len(part) > 1 else f"{part[0]:,}" for part in parts]
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
