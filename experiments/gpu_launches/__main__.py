"""Counts the host's work for one bucket on a GPU: launches, allocations, time to enqueue.

Run ``python -m experiments.gpu_launches``. No GPU is needed.

``launches`` are own kernels and PyTorch's operations of one bucket (a GPT-2 block: 25 MiB, 12
parameters) after three steps, counted while the host code of the CUDA path runs on tensors without
data (:mod:`experiments.tools.fake_gpu`). ``host_us`` is the time in which the host gets through the
same exchange, with the range over turns, if kernels and collectives cost nothing: the host code
runs on a model of the same form whose tensors are so small that PyTorch's operations, which run on
the CPU, cost little but their call. Torch's hooks run on the same tensors. On a GPU a launch takes
2 to 4 microseconds more.

A second table, ``..._verified.csv``, has the launches that verification adds: for each bucket, for
hashes of its parameters, and for the message of a step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any
from unittest import mock

import pandas as pd
import torch
import torch.distributed as dist
import typer
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

import commhooks
from commhooks.core import Layout
from commhooks.hook._engine import Engine
from commhooks.kernels.runtime import cuda
from commhooks.kernels.runtime.op import Op
from experiments.tools.fake_gpu import counts_of, run_bucket, verified_launches
from experiments.tools.tables import printed

__all__ = ["SCHEMES", "measure"]


def _block(d: int) -> Layout:
    """Returns the parameters of a GPT-2 block of width ``d``."""
    shapes: list[tuple[int, ...]] = [
        *((d,), (d,), (3 * d, d), (3 * d,), (d, d), (d,), (d,), (d,)),
        *((4 * d, d), (4 * d,), (d, 4 * d), (d,)),
    ]
    return Layout([f"p{i}" for i in range(len(shapes))], shapes)


COUNTED, TIMED = _block(768), _block(32)
# By name in the table: scheme and options.
SCHEMES: dict[str, tuple[str, dict[str, Any]]] = {
    "none": ("none", {}),
    "fp16, fp32 sum": ("fp16", {"fp32_sum": True}),
    "bf16, fp32 sum": ("bf16", {"fp32_sum": True}),
    **{name: (name, {}) for name in ("fp16", "int8", "fp8", "int4", "onebit")},
    "fp8, MX": ("fp8", {"format": "mx_e4m3"}),
    "powersgd": ("powersgd", {"rank": 1}),
    **{name: (name, {}) for name in ("batched_powersgd", "acpsgd")},
    **{name: (name, {}) for name in ("topk", "random_k", "dgc")},
    **{name: (name, {}) for name in ("eden", "demo", "signsgd", "sdp4bit", "gossip")},
    "onebit_adam": ("onebit_adam", {"freeze_step": 1}),
}
# By name: scheme, options and shapes of a bucket's parameters.
VERIFIED: dict[str, tuple[str, dict[str, Any], list[tuple[int, ...]]]] = {
    "int8, a matrix": ("int8", {}, [(2560, 2560)]),
    "int8": ("int8", {}, [*COUNTED.shapes]),
    "int4, feedback": ("int4", {"error_feedback": True}, [*COUNTED.shapes]),
}
WORLD_SIZES = (8, 64)
WARM_UP = 3  # the step after them finds tables and buffers


def host_times(scheme: str, options: dict[str, Any], world_size: int, turns: int) -> list[float]:
    """Returns the microseconds per bucket, one number per turn."""
    with _free_launches():
        engine = Engine(commhooks.make(scheme, **options), rank=0, world_size=world_size)
        return _timed(lambda: run_bucket(engine, torch.zeros(TIMED.numel), TIMED), turns)


def torch_host_times(hook: Callable[[Any, Any], Any], state: Any, turns: int) -> list[float]:
    """Returns the microseconds per bucket of one of torch's hooks."""
    work = SimpleNamespace(wait=lambda: None)

    def all_reduce(tensor: Tensor, *_: Any, **__: Any) -> Any:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result([tensor])
        work.get_future = lambda: future
        return work

    def run() -> None:
        gradient = torch.zeros(TIMED.numel)
        bucket = SimpleNamespace(
            buffer=lambda: gradient,
            gradients=lambda: TIMED.views(gradient),
            parameters=lambda: TIMED.views(gradient),
            index=lambda: 0,
            is_last=lambda: True,
        )
        hook(state, bucket).wait()

    with _free_launches(), mock.patch.object(dist, "all_reduce", all_reduce):
        return _timed(run, turns)


@contextmanager
def _free_launches() -> Iterator[None]:
    """Runs the host code of CUDA kernels up to the call of CUDA."""
    stubs: dict[tuple[Any, str], Any] = {
        (Op, "implementation"): lambda op, device_type: op.kernels["cuda"],
        (cuda, "_function"): lambda *_: lambda *_, **__: None,
        (cuda, "current_device"): lambda: 0,
        (cuda, "current_stream"): lambda index: 0,
        (cuda, "_most_blocks"): lambda index: 2112,
    }
    with ExitStack() as stack:
        for (owner, name), stub in stubs.items():
            stack.enter_context(mock.patch.object(owner, name, stub))
        # Tensors that nobody writes have what was in memory: denormal numbers would take ten times
        # as long.
        torch.set_flush_denormal(True)
        stack.callback(torch.set_flush_denormal, False)
        yield


def _timed(run: Callable[[], Any], turns: int, *, repeats: int = 20) -> list[float]:
    for _ in range(WARM_UP + 2):
        run()
    times = []
    for _ in range(turns):
        begin = time.perf_counter()
        for _ in range(repeats):
            run()
        times.append((time.perf_counter() - begin) / repeats * 1e6)
    return times


def measure(*, turns: int = 7) -> pd.DataFrame:
    """Returns one row per scheme and number of ranks, and one per hook of torch."""
    rows: list[dict[str, Any]] = []
    for name, (scheme, options) in SCHEMES.items():
        for world_size in WORLD_SIZES:
            rows.append({"hook": name, "ranks": world_size})
            try:
                counts = counts_of(
                    commhooks.make(scheme, **options), COUNTED.shapes, world_size=world_size
                )
            except (RuntimeError, NotImplementedError) as error:
                rows[-1]["note"] = f"waits for the GPU: {error}".splitlines()[0]
                continue
            rows[-1] |= {
                "kernels": counts.kernels.total(),
                "operations": counts.operations.total(),
                "launches": counts.launches,
                "allocations": counts.allocations,
            }
            rows[-1] |= _spread(host_times(scheme, options, world_size, turns))
    group: Any = SimpleNamespace(size=lambda: 8)
    state = powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=4, start_powerSGD_iter=2)
    for name, hook, hook_state in (
        ("torch allreduce_hook", default_hooks.allreduce_hook, group),
        ("torch fp16_compress_hook", default_hooks.fp16_compress_hook, group),
        ("torch powerSGD_hook", powerSGD_hook.powerSGD_hook, state),
    ):
        rows.append(
            {"hook": name, "ranks": 8, **_spread(torch_host_times(hook, hook_state, turns))}
        )
    return pd.DataFrame(rows)


def measure_verified() -> pd.DataFrame:
    """Returns what verification adds, a row per case."""
    rows = []
    for name, (scheme, options, shapes) in VERIFIED.items():
        made = commhooks.make(scheme, **options)
        rows.append({"hook": name, **verified_launches(made, shapes, world_size=WORLD_SIZES[0])})
    return pd.DataFrame(rows)


def _spread(times: list[float]) -> dict[str, float]:
    return {"host_us": statistics.median(times), "least_us": min(times), "most_us": max(times)}


def main(
    out: Annotated[Path, typer.Option(help="The CSV file to write.")] = Path(
        "results/gpu_launches.csv"
    ),
    turns: Annotated[int, typer.Option(help="Turns of 20 buckets per row.")] = 7,
) -> None:
    """Prints a table of launches and host time, and writes it as CSV."""
    printed(measure(turns=turns), out, digits=0)
    printed(measure_verified(), out.with_name(f"{out.stem}_verified.csv"), digits=0)


if __name__ == "__main__":
    typer.run(main)
