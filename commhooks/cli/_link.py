"""Runs ``commhooks link``: measures the fabric between ranks and prints a table."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table

from commhooks.cli._arguments import check_folders
from commhooks.cli._progress import EVERY_S
from commhooks.cli._table import print_table
from commhooks.core._settings import shown
from commhooks.predict._fabric import Link, save_fabric
from commhooks.predict._link import LinkReport, link_report, model_seconds

__all__ = ["link"]

_LOCAL = 2  # processes that the command starts outside of torchrun
_POOR = 1.25  # misfit from which on the table warns: predictions claim a tenth
_START = (
    "Start by torchrun, which sets them (torchrun --standalone --nproc-per-node 2 -m commhooks "
    "link), or unset RANK and LOCAL_WORLD_SIZE"
)
_START_S = 120.0  # for these to import torch and find each other


def link(out: Path | None, budget_s: float, device: str | None, *, full: bool = False) -> int:
    """Measures as a rank of torchrun, or with processes of its own; returns the exit code.

    Args:
        out: file for the fabric.
        budget_s: seconds of the measurement.
        device: of the tensors, "cpu" or "cuda"; "cuda" where each rank has a GPU, by default.
        full: prints the measurements as well.
    """
    check_folders(out)
    _check_environment()
    mates = int(os.environ.get("LOCAL_WORLD_SIZE", _LOCAL))
    if device == "cuda":
        _check_cuda(mates)
    if "RANK" not in os.environ:
        return _with_local_ranks(out, budget_s, device, full=full)
    local = int(os.environ["LOCAL_RANK"])
    if device is None:
        enough = torch.cuda.is_available() and torch.cuda.device_count() >= mates
        device = "cuda" if enough else "cpu"
    if device == "cuda":
        torch.cuda.set_device(local)
    # The ranks meet over Gloo; the measurement has groups of its own.
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=_START_S))
    except (RuntimeError, ValueError) as error:
        raise typer.BadParameter(
            f"the ranks do not meet, by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT: "
            f"{str(error).partition(chr(10))[0]}. {_START}"
        ) from error
    try:
        report = link_report(
            budget_s=budget_s,
            device="cuda" if device == "cuda" else "cpu",
            timeout_s=_START_S + 3 * budget_s,
            progress=_Progress(budget_s) if dist.get_rank() == 0 else lambda seconds: None,
        )
        if dist.get_rank() == 0:
            _show(report, full=full)
            if out is not None:
                save_fabric(report.fabric, out, measured=report.measured)
                typer.echo(f"wrote {out}")
    finally:
        dist.destroy_process_group()
    return 0


def _check_environment() -> None:
    """Raises unless variables of the launcher, and of Gloo, have values that can be used.

    Raises:
        typer.BadParameter: the message names the variable.
    """
    least = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": 0}
    for name in least if "RANK" in os.environ else ["LOCAL_WORLD_SIZE"]:
        value = os.environ.get(name)
        if value is None and name == "LOCAL_WORLD_SIZE":
            continue  # other launchers than torchrun do not set it
        if value is None or not value.isdecimal() or int(value) < least[name]:
            came = "it is not set" if value is None else f"got {shown(value)}"
            raise typer.BadParameter(
                f"{name} is a whole number, {least[name]} or more, for a rank: {came}. {_START}"
            )
    rank, size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if rank is not None and size is not None and int(rank) >= int(size):
        raise typer.BadParameter(f"RANK is below WORLD_SIZE, {size}: got {rank}. {_START}")
    if rank is not None and not os.environ.get("MASTER_ADDR"):
        raise typer.BadParameter(f"MASTER_ADDR is where ranks meet: it is not set. {_START}")
    # Before processes are started, whose errors are tracebacks.
    known = [name for _, name in socket.if_nameindex()]
    for name in filter(None, os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")):
        if name.partition(":")[0] not in known:  # eth0:1 is a further address of eth0
            raise typer.BadParameter(
                f"GLOO_SOCKET_IFNAME is a network interface of this machine ({', '.join(known)}), "
                f"got {shown(name)}: name another one, or unset it and start by torchrun"
            )


def _check_cuda(ranks: int) -> None:
    """Raises unless each rank of this machine can have a GPU, and NCCL can connect them.

    Raises:
        typer.BadParameter: there is no such thing here; the message says what.
    """
    if torch.version.cuda is None and torch.version.hip is None:
        missing = f"this torch has no CUDA: {torch.__version__}"
    elif torch.cuda.device_count() < ranks:
        missing = f"{ranks} ranks need a GPU each, torch sees {torch.cuda.device_count()}"
    elif not dist.is_nccl_available():
        missing = f"this torch has no NCCL: {torch.__version__}"
    else:
        return
    raise typer.BadParameter(f"--device cuda: {missing}")


class _Progress:
    """Writes a line every few seconds while links are measured."""

    def __init__(self, budget_s: float) -> None:
        self._budget_s = budget_s
        self._last = time.monotonic()
        typer.echo(f"measuring for about {budget_s:g} s", err=True)

    def __call__(self, seconds: float) -> None:
        now = time.monotonic()
        if now - self._last >= EVERY_S:
            self._last = now
            typer.echo(f"{seconds:.0f} of about {self._budget_s:g} s", err=True)


def _with_local_ranks(out: Path | None, budget_s: float, device: str | None, *, full: bool) -> int:
    typer.echo(
        f"{_LOCAL} processes of this machine; for all of its GPUs:\n"
        f"torchrun --standalone --nproc-per-node 8 -m commhooks link --out link.json\n"
        f"for several machines, on each of them:\n"
        f"torchrun --nnodes ... --nproc-per-node ... -m commhooks link --out link.json\n"
    )
    sys.stdout.flush()  # before what the processes write
    options = [f"--budget={budget_s}", *["--full"] * full]
    options += [] if out is None else [f"--out={out}"]
    options += [] if device is None else [f"--device={device}"]
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone",
        f"--nproc-per-node={_LOCAL}", "-m", "commhooks", "link", *options,
    ]  # fmt: skip
    environment = {"OMP_NUM_THREADS": "1"} | os.environ
    try:
        limit = _START_S + 5 * budget_s
        return subprocess.run(command, env=environment, timeout=limit).returncode
    except subprocess.TimeoutExpired:
        typer.echo(f"commhooks link: no result within {limit:.0f} s", err=True)
        return 1


def _show(report: LinkReport, *, full: bool = False) -> None:
    layout, fabric = report.layout, report.fabric
    nodes = -(-layout.ranks // layout.per_node)
    title = (
        f"{layout.ranks} ranks on {nodes} node{'s' * (nodes > 1)}, "
        f"{report.device} tensors over {fabric.library}"
    )
    console = Console()
    if full:
        print_table(console, _measured(report, title))
    else:
        console.print(title, highlight=False)
    if fabric.inside is not None:
        console.print(f"inside a node: {_words(fabric.inside)}", highlight=False)
    if nodes > 1:
        console.print(f"between nodes: {_words(fabric.between)}", highlight=False)
    if full and fabric.library == "gloo":
        console.print(
            f"two messages at once share {fabric.overlap:.0%} of the latency", highlight=False
        )
    if full:
        console.print(
            f"medians of {report.rounds} rounds of all; spread: of the middle half of them. "
            f"{report.seconds:.1f} s in all",
            highlight=False,
        )
    if report.fit_error > _POOR:
        console.print(
            f"The fit is poor: half of these measurements are off by a factor of "
            f"{report.fit_error:.1f} or more, and so are predictions for this link. Measure again "
            f"while nothing else runs, and longer (--budget)"
            f"{'' if full else '; --full shows the measurements'}",
            highlight=False,
        )


def _measured(report: LinkReport, title: str) -> Table:
    """Returns a table of the measurements beside the fit."""
    layout, fabric = report.layout, report.fabric
    table = Table(title=title)
    table.add_column("ranks")
    table.add_column("collective")
    for column in ("size", "measured [ms]", "spread", "model [ms]", "model / measured"):
        table.add_column(column, justify="right")
    for case in sorted(report.times, key=lambda case: (case.part, case.collective, case.nbytes)):
        model = model_seconds(layout, case, fabric)
        table.add_row(
            case.part,
            case.collective,
            _size(case.nbytes),
            f"{1e3 * case.seconds:.3f}",
            f"{(case.high_s - case.low_s) / case.seconds:.0%}",
            f"{1e3 * model:.3f}",
            f"{model / case.seconds:.2f}",
        )
    return table


def _words(link: Link) -> str:
    return (
        f"latency {1e6 * link.latency:.3g} us, bandwidth {link.bandwidth / 1e9:.3g} GB/s "
        f"({8 * link.bandwidth / 1e9:.3g} Gbit/s)"
    )


def _size(nbytes: int) -> str:
    return f"{nbytes // 2**20} MiB" if nbytes >= 2**20 else f"{nbytes // 2**10} KiB"
