"""What the commands ``commhooks doctor``, ``schemes``, ``new`` and ``check`` do."""

from __future__ import annotations

import inspect
import keyword
import os
import platform
import re
import runpy
import sys
import traceback
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table

from commhooks import (
    Scheme,
    Simulation,
    kernels,
    make,
    scheme_names,
)
from commhooks._version import __version__
from commhooks.cli.template import TEMPLATE
from commhooks.core.registry import factory_of, options_of
from commhooks.core.scheme import slots_of
from commhooks.kernels.runtime import cpu, cuda
from commhooks.research.conformance import check_scheme, laws_of
from commhooks.research.trace import bits_per_entry

__all__ = ["check", "doctor", "load_files", "new", "schemes"]

_LATE = 10**6  # a step after all warm-ups
_WIDE = 84  # columns for the whole listing


# ---- doctor


def doctor() -> None:
    """Prints versions, back ends, and which kernels run."""
    console = Console()
    try:
        console.print(_facts())
        console.print(_operations())
    except ValueError as error:  # of a variable of the environment
        raise typer.BadParameter(str(error)) from error


def _facts() -> Table:
    table = Table(title="installation", show_header=False)
    table.add_row("commhooks", __version__)
    table.add_row("Python", f"{platform.python_version()} on {platform.machine()}")
    table.add_row("torch", torch.__version__)
    backends = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    table.add_row("back ends", ", ".join(name for name, there in backends.items() if there))
    reason = cpu.missing()
    table.add_row("CPU kernels", reason or f"built; instruction set {cpu.instruction_set()}")
    reason = cuda.missing()
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


# ---- schemes


def schemes(which: Sequence[str]) -> None:
    """Prints all schemes, those of files too; or, if some are named, what these are."""
    load_files([Path(one) for one in which if one.endswith(".py")])
    named = [one for one in which if not one.endswith(".py")]
    console = Console()
    for name in named:
        console.print(_described(name))
    if not named:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # buckets too small to share, on a machine that may be busy
        try:
            console.print(_listed(wide=console.width >= _WIDE))
        finally:
            torch.set_num_threads(threads)


def _listed(wide: bool) -> Table:
    table = Table(title="schemes")
    shown = ["name", "class", "rounds", "biased", "memory", "bits"]
    shown = shown if wide else [one for one in shown if one not in ("class", "rounds")]
    for column in shown:
        table.add_column(column, no_wrap=True)
    for name in scheme_names():
        row = {"name": name, **_facts_of(name)}
        table.add_row(*(escape(row.get(column, "")) for column in shown))
    table.caption = "bits: an entry, after all warm-ups. commhooks schemes NAME says more"
    return table


def _facts_of(name: str) -> dict[str, str]:
    try:
        scheme, bare = _made(name), _made(name, error_feedback=False)
    except typer.BadParameter:  # a user's scheme that needs options, or does not work
        return {"class": f"see commhooks schemes {name}"}
    return {
        "class": type(bare).__name__,
        "rounds": str(scheme.traits.rounds),
        "biased": "yes" if bare.traits.biased else "",
        "memory": "yes" if slots_of(scheme) else "",
        "bits": _bits(scheme),
    }


def _made(name: str, **options: Any) -> Scheme:
    """The scheme, or a usage error that names it: it may be a user's."""
    try:
        return make(name, **options)
    except Exception as error:
        raise typer.BadParameter(f"{name} cannot be made: {_sentence(error)}") from error


def _bits(scheme: Scheme) -> str:
    """Bits an entry, of two steps after two others."""
    ranks = Simulation(scheme, {"weight": (512, 512)}, world_size=4)
    for engine in ranks.engines:
        engine.step = _LATE
    try:
        for step in range(4):
            if step == 2:
                ranks.requests.clear()
                ranks.wire_bytes.clear()
            ranks.step([torch.randn(512 * 512) for _ in range(4)])
    except Exception as error:  # of a user's scheme
        return f"fails: {type(error).__name__}"
    return f"{bits_per_entry(ranks, 2 * 512 * 512):.3g}"


_WRAPPERS = {
    "start_step": (0, "dense before that step"),
    "error_feedback": (None, "keeps what was not sent, and adds it to the next gradient"),
    "wire_dtype": (None, '"fp16" or "bf16": floating payloads travel in that type'),
    "coalesce": (False, "all buckets of a step in one exchange"),
}


def _described(name: str) -> Table:
    """One sentence, and a row for each option."""
    factory = factory_of(name)
    try:
        options = options_of(factory) or {}
    except TypeError as error:  # a user's class that is no dataclass
        raise typer.BadParameter(f"{name}: {error}") from error
    missing = [one for one, default in options.items() if default is inspect.Parameter.empty]
    feedback = None if missing else _made(name) != _made(name, error_feedback=False)
    text = inspect.getdoc(factory) or ""
    table = Table(
        title=f"{name}: {_plain(text.partition(chr(10) * 2)[0])}", title_justify="left", expand=True
    )
    table.add_column("option", no_wrap=True)
    table.add_column("default", overflow="fold")
    table.add_column("meaning", overflow="fold", ratio=1)
    said = _arguments(text)
    for option, default in options.items():
        shown = "needed" if default is inspect.Parameter.empty else repr(default)
        table.add_row(option, escape(shown), escape(said.get(option, "")))
    for option, (default, meaning) in _WRAPPERS.items():
        table.add_row(option, repr(feedback if option == "error_feedback" else default), meaning)
    table.caption = f'commhooks.register(ddp_model, "{name}", ...)'
    return table


def _arguments(text: str) -> dict[str, str]:
    """What a docstring says of each argument."""
    _, _, rest = text.partition("\nArgs:\n")
    found: dict[str, str] = {}
    last: list[str] = []
    for line in rest.splitlines():
        if not line.strip() or not line.startswith(" "):
            break
        match = re.fullmatch(r" {4}(\w[\w, ]*): (.*)", line)
        if match:
            last = match[1].split(", ")
            found |= dict.fromkeys(last, _plain(match[2]))
        else:
            found |= {one: f"{found[one]} {_plain(line.strip())}" for one in last}
    return found


def _plain(text: str) -> str:
    """Without the marks of the documentation."""
    text = re.sub(r":\w+:`(.*?)`", r"\1", text)
    return " ".join(text.replace("`", "").split())


# ---- new and check


def new(name: str, path: Path) -> None:
    """Writes a scheme to begin with."""
    if not re.fullmatch(r"[a-z_]*[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise typer.BadParameter(
            f"a name begins with a small letter or _, has small letters, digits and _, and is no "
            f"word of Python, got {name!r}"
        )
    if name in scheme_names():
        raise typer.BadParameter(f"the name {name!r} is taken by a registered scheme")
    if path.suffix != ".py":
        raise typer.BadParameter(f"the file ends in .py, got {path}")
    if path.exists():
        raise typer.BadParameter(f"{path} exists; it is left as it is")
    if path.stem in sys.stdlib_module_names or path.stem in ("commhooks", "torch", "numpy"):
        raise typer.BadParameter(f"{path} would hide the module {path.stem}; choose another name")
    words = "".join(part.capitalize() for part in name.split("_"))
    path.write_text(TEMPLATE.replace("NAME", name).replace("CLASS", words), encoding="utf-8")
    typer.echo(f"wrote {path}; now: commhooks check {path}")


def check(target: str) -> int:
    """Runs the laws, prints what came of each; 1 if one is broken."""
    found = load_files([Path(target)]) if target.endswith(".py") else [target]
    if not found:
        raise typer.BadParameter(f"{target} registers no scheme: see commhooks.register_scheme")
    broken = 0
    for name in found:
        factory_of(name)
        if not _made(name).traits.averages:
            raise typer.BadParameter(f"{name} does not average over ranks: the laws are not for it")
        table = Table("law", "", "what broke it", title=name)
        for verdict in track(check_scheme(partial(make, name)), name, len(laws_of(make(name)))):
            mark = "[green]holds[/]" if verdict.holds else "[red]broken[/]"
            table.add_row(verdict.law, mark, escape(verdict.error))
            broken += not verdict.holds
        Console().print(table)
    return 1 if broken else 0


def load_files(files: Sequence[Path]) -> list[str]:
    """Runs files that register schemes; the names they add."""
    before = set(scheme_names())
    for path in files:
        if not path.is_file():
            raise typer.BadParameter(f"no file {path}")
        try:
            runpy.run_path(str(path), run_name=path.stem)
        except (Exception, SystemExit) as error:
            raise typer.BadParameter(f"{path} does not run: {_sentence(error, path)}") from error
    return [name for name in scheme_names() if name not in before]


def _sentence(error: BaseException, path: Path | None = None) -> str:
    """What an error of a user's code says, and the line of ``path`` that it came from."""
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if path is not None and frame.filename == str(path)
    ]
    where = f"line {lines[-1]}: " if lines else ""
    return f"{where}{type(error).__name__}: {error}"
