"""The command line: ``commhooks doctor``, ``schemes``, ``new`` and ``check``."""

from __future__ import annotations

import os
import platform
import runpy
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table

from commhooks import Simulation, kernels, make, names
from commhooks._template import TEMPLATE
from commhooks._version import __version__
from commhooks.conformance import check_scheme, laws_of
from commhooks.kernels import _cpu, _cuda
from commhooks.trace import bits_per_entry

__all__ = ["app", "load_files"]

app = typer.Typer(add_completion=False, no_args_is_help=True)


@app.callback()
def main() -> None:
    """Gradient communication hooks with compression for PyTorch data-parallel training."""


@app.command()
def doctor() -> None:
    """Says what this installation uses: versions, back ends, and which kernels run, or why not."""
    console = Console()
    console.print(_facts())
    console.print(_operations())


@app.command()
def schemes(
    files: Annotated[list[Path] | None, typer.Argument(help="Files with more schemes.")] = None,
) -> None:
    """Lists the registered schemes."""
    load_files(files or [])
    table = Table("name", "class", "rounds", "biased", "memory", "bits an entry", title="schemes")
    for name in names():
        scheme = make(name)
        bare = make(name, error_feedback=False)
        ranks = Simulation(scheme, {"weight": (512, 512)}, world_size=4)
        ranks.step([torch.randn(512 * 512) for _ in range(4)])
        bits = f"{bits_per_entry(ranks, 512 * 512):.3g}"
        flags = ["yes" if flag else "" for flag in (bare.biased, scheme.stateful)]
        table.add_row(name, type(bare).__name__, str(scheme.rounds), *flags, bits)
    Console().print(table)


@app.command()
def new(
    name: Annotated[str, typer.Argument(help="Of the scheme, such as half_topk.")],
    out: Annotated[Path | None, typer.Option(help="The file; NAME.py by default.")] = None,
) -> None:
    """Writes a file with a scheme that obeys all laws as it stands, to begin with."""
    path = out or Path(f"{name}.py")
    if not name.isidentifier() or name != name.lower():
        raise typer.BadParameter(f"a name has small letters, digits and _, got {name!r}")
    if name in names():
        raise typer.BadParameter(f"the name {name!r} is taken by a registered scheme")
    if path.exists():
        raise typer.BadParameter(f"{path} exists; it is left as it is")
    words = "".join(part.capitalize() for part in name.split("_"))
    path.write_text(TEMPLATE.replace("NAME", name).replace("CLASS", words))
    typer.echo(f"wrote {path}; now: commhooks check {path}")


@app.command()
def check(
    target: Annotated[str, typer.Argument(help="A file with schemes, or a registered name.")],
) -> None:
    """Runs the laws on a scheme, or on all that a file registers; fails if one is broken."""
    found = load_files([Path(target)]) if target.endswith(".py") else [target]
    if not found:
        raise typer.BadParameter(f"{target} registers no scheme: see commhooks.register_scheme")
    broken = 0
    for name in found:
        if not make(name).averages:
            raise typer.BadParameter(f"{name} does not average over ranks: the laws are not for it")
        table = Table("law", "", "what broke it", title=name)
        for verdict in track(check_scheme(partial(make, name)), name, len(laws_of(make(name)))):
            mark = "[green]holds[/]" if verdict.holds else "[red]broken[/]"
            table.add_row(verdict.law, mark, escape(verdict.error))
            broken += not verdict.holds
        Console().print(table)
    raise typer.Exit(1 if broken else 0)


def load_files(files: Sequence[Path]) -> list[str]:
    """Runs files that register schemes; the names they add."""
    before = set(names())
    for path in files:
        if not path.is_file():
            raise typer.BadParameter(f"no file {path}")
        runpy.run_path(str(path), run_name=path.stem)
    return [name for name in names() if name not in before]


def _facts() -> Table:
    table = Table(title="installation", show_header=False)
    table.add_row("commhooks", __version__)
    table.add_row("Python", f"{platform.python_version()} on {platform.machine()}")
    table.add_row("torch", torch.__version__)
    backends = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    table.add_row("back ends", ", ".join(name for name, there in backends.items() if there))
    reason = _cpu.missing()
    table.add_row("CPU kernels", reason or f"built; instruction set {_cpu.instruction_set()}")
    reason = _cuda.missing()
    table.add_row("CUDA kernels", reason or "CuPy and NVRTC found")
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        table.add_row(f"device {index}", f"{torch.cuda.get_device_name(index)}, sm_{major}{minor}")
    for variable in ("COMMHOOKS_KERNELS", "COMMHOOKS_CPU", "COMMHOOKS_CACHE"):
        if variable in os.environ:
            table.add_row(variable, os.environ[variable])
    return table


def _operations() -> Table:
    """Reasons that hold for the whole device are in the first table."""
    table = Table("op", "cpu", "cuda", title="what runs")
    cpu, cuda = kernels.implementations("cpu"), kernels.implementations("cuda")
    for name in cpu:
        table.add_row(name, cpu[name].partition(":")[0], cuda[name].partition(":")[0])
    return table
