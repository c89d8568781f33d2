"""Tests and times the CUDA kernels on a GPU.

``python -m experiments.gpu_kernels`` runs the tests that use a device, runs random calls under
compute-sanitizer if it is installed, and compares the time of every op with that of a copy of the
same bucket. ``share`` is the bandwidth of an op, counting the bytes that it has to move, over that
of the copy; ``goal`` is what it should reach. Large buckets (256 MiB) take turns, so that nothing
is found in the cache. A bucket of 25 MiB, which fits into it, is timed in the replay of a CUDA
graph and reported separately.
"""

from __future__ import annotations

import json
import platform
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
import typer
from rich.progress import Progress

from commhooks.kernels import use_kernels
from commhooks.kernels.runtime import cuda
from experiments.kernel_cases import COPIED, Case, cases

LARGE, SMALL = 256 * 2**20 // 4, 25 * 2**20 // 4  # entries
ROTATING = 3  # large buckets that take turns


def _milliseconds(calls: list[Callable[[], Any]], repeats: int) -> float:
    """Returns the median time of a call, over turns that make all calls one after the other."""
    for call in calls:
        call()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # Keeps the device busy while the host launches the calls that are timed: otherwise the
        # time of the host's launches would be counted.
        calls[-1]()
        begin.record()
        for call in calls:
            call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / len(calls))
    return statistics.median(times)


def _replayed(call: Callable[[], Any], repeats: int) -> float:
    """Returns the median time of a call in a CUDA graph of ten calls, which has no launch costs."""
    call()  # compiles; a capture does not allow that
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            call()
    return _milliseconds([graph.replay], repeats) / 10


def _row(case: Case, size: str, entries: int, copy: float, took: float) -> dict[str, Any]:
    return {
        "op": case.name,
        "bucket": size,
        "microseconds": took * 1e3,
        "GB/s": case.bytes * entries / took / 1e6,
        "share": case.bytes / COPIED * copy / took,
        "goal": case.goal,
    }


def _measure(repeats: int, compiled: bool, out: Path) -> pd.DataFrame:
    """Returns all rows; writes the table after each, since the study may be interrupted."""
    rows: list[dict[str, Any]] = []

    def add(row: dict[str, Any]) -> None:
        rows.append(row)
        pd.DataFrame(rows).to_csv(out, index=False)

    buckets = [torch.randn(LARGE, device="cuda") for _ in range(ROTATING)]
    targets = [torch.empty_like(bucket) for bucket in buckets]
    pairs = zip(buckets, targets, strict=True)
    copy = _milliseconds([lambda x=x, y=y: y.copy_(x) for x, y in pairs], repeats)
    del targets
    # Each op on all buckets.
    groups = list(zip(*(cases(bucket) for bucket in buckets), strict=True))
    with Progress() as progress:
        bar = progress.add_task("256 MiB", total=len(groups))
        for group in groups:
            progress.update(bar, description=group[0].name)
            took = _milliseconds([case.run for case in group], repeats)
            row = _row(group[0], "256 MiB", LARGE, copy, took)
            row["definition over kernel"] = _milliseconds([group[0].define], 5) / took
            if compiled:
                torch.compiler.reset()  # or the number of recompilations is exceeded
                call = torch.compile(group[0].define)
                row["compiled over kernel"] = _milliseconds([call], 5) / took
            for name, call in group[0].rivals.items():
                row[f"{name} over kernel"] = _milliseconds([call], 5) / took
            add(row)
            progress.advance(bar)
    del groups, buckets
    torch.cuda.empty_cache()
    x = torch.randn(SMALL, device="cuda")
    y = torch.empty_like(x)
    copy = _replayed(lambda: y.copy_(x), repeats)
    for case in cases(x):
        add(_row(case, "25 MiB, graph", SMALL, copy, _replayed(case.run, repeats)))
    return pd.DataFrame(rows)


def _checked(*command: str) -> str:
    """Runs a program and returns its exit status and last line; a failure is a result, too."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    typer.echo(done.stdout[-3000:] + done.stderr[-3000:])
    lines = (done.stdout.strip() or done.stderr.strip() or "nothing printed").splitlines()
    return f"exit {done.returncode}: {lines[-1]}"


def _tests() -> dict[str, str]:
    results = {
        "tests": _checked(
            *(sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider"),
            *("tests/device", "tests/kernels"),
        )
    }
    sanitizer = shutil.which("compute-sanitizer")
    for tool in ("memcheck", "racecheck"):
        results[tool] = "compute-sanitizer is not installed"
        if sanitizer is not None:
            fuzz = (sys.executable, "-m", "tests.kernels.fuzz", "gpu")
            results[tool] = _checked(sanitizer, "--tool", tool, "--error-exitcode", "1", *fuzz)
    return results


def main(
    repeats: Annotated[int, typer.Option(help="Timed turns per op.", min=10)] = 30,
    tests: Annotated[bool, typer.Option(help="Run the tests first.")] = True,
    compiled: Annotated[bool, typer.Option(help="The definitions by torch.compile too.")] = True,
    out: Annotated[Path, typer.Option(help="Folder of what is written.")] = Path(
        "results/gpu_kernels"
    ),
) -> None:
    """Prints shares of a copy's bandwidth, and writes them with the versions used."""
    if not torch.cuda.is_available():
        sys.exit("experiments.gpu_kernels: torch sees no CUDA device")
    if reason := cuda.missing():
        sys.exit(f"experiments.gpu_kernels: {reason}")
    out.mkdir(parents=True, exist_ok=True)
    facts = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "CUDA of torch": torch.version.cuda,
        "NVRTC": ".".join(map(str, cuda._nvrtc_version())),
        "Python": platform.python_version(),
        **(_tests() if tests else {}),
    }
    (out / "facts.json").write_text(json.dumps(facts, indent=2) + "\n")
    with use_kernels("native"):
        table = _measure(repeats, compiled, out / "gpu_kernels.csv")
    typer.echo(table.to_string(index=False, float_format="{:.2f}".format))
    typer.echo(f"wrote {out / 'gpu_kernels.csv'} and facts.json")


if __name__ == "__main__":
    typer.run(main)
