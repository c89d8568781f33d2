"""Prints what an installation uses, and tries an exchange between two processes of this machine."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from commhooks import kernels
from commhooks._version import __version__
from commhooks.cli import _pair as _pair
from commhooks.cli._table import print_table
from commhooks.kernels import all_finite, use_kernels
from commhooks.kernels.runtime import cpu, cuda
from commhooks.kernels.runtime.op import current_mode

__all__ = ["check_environment", "doctor", "exchange_of_two", "one_launch", "version"]

_LIMIT_S = 120.0  # for two processes to import torch, meet and exchange


def version() -> str:
    """Returns the releases of commhooks and torch, and which implementation of the ops runs."""
    check_environment()
    return (
        f"commhooks {__version__}, torch {torch.__version__}, Python {platform.python_version()}\n"
        f"on the CPU: {_what_runs('cpu')}\n"
        f"on CUDA: {_what_runs('cuda')}"
    )


def check_environment() -> None:
    """Raises unless the variables that choose kernels have values that can be used here.

    Raises:
        typer.BadParameter: the message says which values there are.
    """
    try:
        current_mode()
        if cpu.missing() is None:
            cpu.instruction_set()
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _what_runs(device_type: str) -> str:
    """Describes the implementation of ``quantize``, for which every back end has a kernel."""
    answer = kernels.implementations(device_type)["quantize"]
    if answer != "kernel":
        return f"PyTorch fallback ({answer.removeprefix('definition: ')})"
    return (
        f"kernels, instruction set {cpu.instruction_set()}" if device_type == "cpu" else "kernels"
    )


def doctor() -> int:
    """Prints versions, back ends, which kernels run, and whether two processes can exchange.

    Returns:
        1 if they cannot, else 0.
    """
    console = Console()
    table = _facts()
    with console.status("two processes exchange a tensor"):
        answer, works = exchange_of_two()
    table.add_row("2 processes", escape(answer))
    print_table(console, table)
    return 0 if works else 1


def _facts() -> Table:
    table = Table(show_header=False)
    table.add_row("commhooks", __version__)
    table.add_row("Python", f"{platform.python_version()} on {platform.machine()}")
    backends = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    present_backends = ", ".join(name for name, present in backends.items() if present)
    table.add_row("torch", f"{torch.__version__}, back ends: {present_backends}")
    reason = cpu.missing()
    table.add_row("CPU kernels", reason or f"built; instruction set {cpu.instruction_set()}")
    reason = cuda.missing()
    table.add_row("CUDA kernels", reason or "CuPy and NVRTC found")
    if reason is None and torch.cuda.is_available():
        table.add_row("a launch", one_launch())
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        table.add_row(f"device {index}", f"{torch.cuda.get_device_name(index)}, sm_{major}{minor}")
    for variable in ("COMMHOOKS_KERNELS", "COMMHOOKS_CPU", "COMMHOOKS_CACHE"):
        if variable in os.environ:
            table.add_row(variable, escape(os.environ[variable]))
    for device in ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]:
        table.add_row("ops", _operations(device))
    return table


def _operations(device: str) -> str:
    """Counts the ops that have a kernel, and names those that run without one."""
    answers = kernels.implementations(device)
    without_kernel = [name for name, answer in answers.items() if answer != "kernel"]
    kernels_run = len(answers) - len(without_kernel)
    count = f"{kernels_run} of {len(answers)} ops: {device.upper()} kernel"
    if not without_kernel:
        return count
    return (
        f"{count}; PyTorch fallback (computes the same, more slowly): {', '.join(without_kernel)}"
    )


def one_launch(device: str = "cuda") -> str:
    """Runs a kernel on a device, compares its result, and describes the outcome; never raises."""
    try:
        begin = time.perf_counter()
        with use_kernels("native"):
            x = torch.zeros(1000, device=device)
            good = all_finite(x)
            x[7] = torch.nan
            bad = all_finite(x)
        results = bool(good), bool(bad)  # waits for the device
        took = time.perf_counter() - begin
    except Exception as error:  # whatever it is: the command reports what is wrong here
        text = str(error).strip().splitlines() or [""]
        return f"failed: {type(error).__name__}: {text[0]}"
    if results != (True, False):
        return f"wrong: all_finite of 1000 zeros, and with a NaN, is {results}"
    return f"right ({1e3 * took:.0f} ms with loading, or compiling, the kernel)"


# ---- two processes


def exchange_of_two(limit_s: float = _LIMIT_S) -> tuple[str, bool]:
    """Starts two processes that average a tensor by "int8"; returns the outcome, and if it is good.

    Args:
        limit_s: seconds after which they are ended.
    """
    with tempfile.TemporaryDirectory(prefix="commhooks-doctor-") as folder:
        meeting = Path(folder) / "meeting"
        # By its file: with -m, a folder commhooks where the command runs would come first.
        command = [sys.executable, _pair.__file__, str(meeting)]
        # Of a job that this command runs in: the two are a job of their own.
        environment = {
            name: value
            for name, value in os.environ.items()
            if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        } | {"OMP_NUM_THREADS": "1"}
        outputs = [Path(folder) / f"rank{rank}.txt" for rank in range(2)]
        begin, processes = time.monotonic(), list[subprocess.Popen[bytes]]()
        try:
            for rank, output in enumerate(outputs):
                with output.open("wb") as file:
                    processes.append(
                        subprocess.Popen(
                            [*command, str(rank), str(limit_s)],
                            env=environment,
                            stdin=subprocess.DEVNULL,
                            stdout=file,
                            stderr=subprocess.STDOUT,
                        )
                    )
            codes = [process.poll() for process in processes]
            # Until both have ended, or the first fails: the other would wait for it.
            while None in codes and not any(codes) and time.monotonic() < begin + limit_s:
                time.sleep(0.05)
                codes = [process.poll() for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        texts = [output.read_text(errors="replace") for output in outputs]
    if codes == [0, 0]:
        return 'an all-reduce with "int8" works over gloo', True
    return _why(codes, texts, limit_s), False


def _why(codes: Sequence[int | None], texts: Sequence[str], limit_s: float) -> str:
    """Explains exit codes of which not all are 0; None: the process was ended."""
    for rank, (code, text) in enumerate(zip(codes, texts, strict=True)):
        if code:  # the first that failed by itself
            last = (text.strip().splitlines() or ["it wrote nothing"])[-1]
            return f"failed: rank {rank} ended with exit code {code}: {last}"
    return (
        f'failed: no all-reduce with "int8" within {limit_s:.0f} s. Most often the two do not find '
        f"each other: name the network interface in GLOO_SOCKET_IFNAME (lo on this machine alone), "
        f"and look at the firewall"
    )
