"""The command line: ``commhooks doctor``."""

from __future__ import annotations

import os
import platform

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table

from commhooks import kernels
from commhooks._version import __version__
from commhooks.kernels import _cpu, _cuda

__all__ = ["app"]

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
