"""Runs ``commhooks simulate``: predicts steps of schemes and says where each stops paying."""

from __future__ import annotations

import ast
import math
import runpy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import nn

from commhooks import Scheme
from commhooks.cli.user_schemes import load_files, made, sentence
from commhooks.predict.counted import counted
from commhooks.predict.device import Device
from commhooks.predict.device import device as device_of
from commhooks.predict.fabric import Fabric
from commhooks.predict.fabric import fabric as fabric_of
from commhooks.predict.models import MODELS, Model, model
from commhooks.predict.simulate import BASELINE, MARGIN, Comparison, Row, compare, write_csv
from commhooks.predict.simulate_plot import draw
from commhooks.predict.workload import Workload, load_workload

__all__ = ["Options", "simulate"]


@dataclass(frozen=True)
class Options:
    """Holds the arguments of the command, as they were given.

    Attributes:
        model: a built-in name, or ``path.py:factory``.
        timeline: file of :func:`commhooks.predict.save_workload`, instead of a model.
        schemes, ranks, fabric: lists with commas.
        device: a name.
        batch: samples of a rank's step.
        bucket_mb: MiB at which a bucket is full.
        csv, plot: files to write.
    """

    model: str | None
    timeline: Path | None
    schemes: str
    ranks: str
    fabric: str
    device: str
    batch: int | None
    bucket_mb: float
    csv: Path | None
    plot: Path | None


def simulate(options: Options) -> None:
    """Prints a table per fabric, and writes files that were asked for.

    Raises:
        typer.BadParameter: an argument is wrong.
    """
    for path in (options.csv, options.plot):
        if path is not None and not path.absolute().parent.is_dir():
            raise typer.BadParameter(f"{path}: there is no folder {path.absolute().parent}")
    try:
        device = device_of(options.device)
        fabrics = [fabric_of(name) for name in _listed(options.fabric)]
        workload = _workload(options, device)
        found = compare(
            workload,
            _schemes(_listed(options.schemes)),
            ranks=_ranks(options.ranks),
            fabrics=fabrics,
            device=device,
            cap_mb=options.bucket_mb,
        )
    except ValueError as error:  # PredictionError is reported for all commands
        raise typer.BadParameter(str(error)) from error
    console = Console()
    for index, fabric in enumerate(fabrics):
        console.print(_table(found, fabric, device))
        for line in _where(found, index):
            console.print(line, highlight=False)
    if options.csv is not None:
        write_csv(found, options.csv)
        typer.echo(f"wrote {options.csv}")
    if options.plot is not None:
        draw(found, options.plot)
        typer.echo(f"wrote {options.plot}")


# ---- arguments


def _listed(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _ranks(text: str) -> list[int]:
    try:
        return [int(word) for word in _listed(text)]
    except ValueError:
        raise typer.BadParameter(f"--ranks {text}: whole numbers with commas: 2,8,64") from None


def _schemes(words: Sequence[str]) -> dict[str, Scheme]:
    """Makes schemes; files with more are loaded, and theirs are compared as well."""
    added = load_files([Path(word) for word in words if word.endswith(".py")])
    words = [word for word in words if not word.endswith(".py")]
    return {word: _scheme(word) for word in [*words, *added]}


def _scheme(word: str) -> Scheme:
    name, *settings = word.split(":")
    options: dict[str, Any] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise typer.BadParameter(
                f"--schemes {word}: options follow a name as in powersgd:rank=4:start_step=10"
            )
        options[key] = _value(value)
    return made(name, **options)


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text.capitalize() if text in ("true", "false") else text)
    except (ValueError, SyntaxError):
        return text


def _workload(options: Options, device: Device) -> Workload:
    if (options.model is None) == (options.timeline is None):
        raise typer.BadParameter("give either --model or --timeline")
    if options.timeline is not None:
        if options.batch is not None:
            raise typer.BadParameter("--batch: a recorded timeline has the batch of its run")
        return load_workload(options.timeline)
    name = options.model or ""
    source = model(name) if name in MODELS else _own(name)
    if isinstance(source, Workload):
        return source
    return source.workload(device, batch=options.batch)


def _own(target: str) -> Model | Workload:
    """Returns what ``path.py:factory`` makes, as a model or a workload."""
    path, colon, name = target.rpartition(":")
    if not colon or not path.endswith(".py"):
        raise typer.BadParameter(
            f"--model {target}: neither path.py:factory nor one of {', '.join(MODELS)}"
        )
    if not Path(path).is_file():
        raise typer.BadParameter(f"--model {target}: no file {path}")
    try:
        factory = runpy.run_path(path, run_name=Path(path).stem)[name]
        result = factory()
    except KeyError as error:
        if error.args != (name,):
            raise typer.BadParameter(f"{target}: {sentence(error, Path(path))}") from error
        raise typer.BadParameter(f"--model {target}: {path} has no {name}") from error
    except (Exception, SystemExit) as error:  # a user's code may raise anything
        raise typer.BadParameter(f"{target}: {sentence(error, Path(path))}") from error
    if isinstance(result, Model | Workload):
        return result
    module, *inputs = result if isinstance(result, tuple) else (result,)
    if not isinstance(module, nn.Module) or not inputs:
        raise typer.BadParameter(
            f"--model {target}: {name}() returns (module, example input, ...), or a Workload of "
            f"commhooks.predict, got {type(result).__name__}"
        )
    return counted(module, *inputs)


# ---- results


def _table(found: Comparison, fabric: Fabric, device: Device) -> Table:
    workload = found.workload
    table = Table(
        title=f"{workload.name}, {workload.numel / 1e6:,.1f} M parameters, on {device.name} and "
        f"{fabric.name}: {1e3 * workload.compute_s:.1f} ms of computing per step",
        box=SIMPLE_HEAD,
        caption=f"speed-up: over bf16. sent: by each rank. pays: saves {MARGIN:.0%} of bf16's step "
        f"or more, with links below this bandwidth.",
    )
    table.add_column("ranks", justify="right")
    table.add_column("scheme", overflow="fold")
    for column in ("step|[ms]", "exposed|[ms]", "speed-up|", "sent|[MB]", "pays below|[Gbit/s]"):
        table.add_column(escape(column.replace("|", "\n")), justify="right", no_wrap=True)
    before = None
    for row in found.rows():
        if row.fabric != fabric.name:
            continue
        if before not in (None, row.ranks):
            table.add_section()
        table.add_row(
            "" if row.ranks == before else f"{row.ranks:,}",
            row.scheme,
            f"{1e3 * row.step_s:,.1f}",
            f"{1e3 * row.exposed_s:,.1f}",
            f"{row.speedup:.2f}",
            f"{row.rank_nbytes / 1e6:,.1f}",
            _below(row),
        )
        before = row.ranks
    return table


def _below(row: Row) -> str:
    if row.scheme == BASELINE:
        return ""
    if row.pays_below == 0:
        return "never"
    if math.isinf(row.pays_below):
        return "always"
    gbit = 8 * row.pays_below / 1e9
    return f"{gbit:.0f}" if gbit >= 100 else f"{gbit:.2g}"


def _where(found: Comparison, fabric: int) -> list[str]:
    """Says with how many ranks each scheme pays."""
    name, lines = found.fabrics[fabric].name, []
    for scheme in found.schemes:
        if scheme == BASELINE:
            continue
        sizes = found.paying_sizes(scheme, fabric)
        if not sizes:
            lines.append(f"{scheme}: bf16 is as fast on {name}, with any number of ranks")
        else:
            lines.append(f"{scheme}: pays on {name} with {_ranges(sizes, found.sizes)} ranks")
    return lines


def _ranges(sizes: Sequence[int], of: Sequence[int]) -> str:
    """Returns numbers as ranges of neighbours in ``of``: "2 to 8 and 64"."""
    parts: list[list[int]] = []
    for size in sizes:
        if parts and of.index(size) == of.index(parts[-1][-1]) + 1:
            parts[-1].append(size)
        else:
            parts.append([size])
    words = [f"{one[0]:,} to {one[-1]:,}" if len(one) > 1 else f"{one[0]:,}" for one in parts]
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
