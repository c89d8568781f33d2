"""Rehearses the study without a GPU: small buckets on the CPU, and nothing is launched.

Every case builds its arguments, and the host code of its CUDA kernel runs up to the launch. Times
mean nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from commhooks.kernels.runtime import cuda
from commhooks.kernels.runtime.arguments import as_ctypes
from commhooks.kernels.runtime.op import Op
from experiments.gpu_kernels import timing
from experiments.gpu_kernels.table import Setting

__all__ = ["Launches", "rehearsed"]

# 512 x 2304, the matrices of PowerSGD's cases.
ENTRIES = 512 * 2304


class Launches:
    """Replaces ``cuda.launch``: converts the arguments, and records which kernels are launched."""

    def __init__(self) -> None:
        self.kernels: dict[str, set[str]] = {}

    def __call__(
        self,
        source: str,
        name: str,
        device: Any,
        work: int,
        arguments: Sequence[Any],
        rows: int = 1,
        *,
        threads: int = 256,
    ) -> None:
        for argument in arguments:
            as_ctypes(argument)
        self.kernels.setdefault(source, set()).add(name)


@contextmanager
def rehearsed(launches: Launches | None = None) -> Iterator[Callable[[Path], Setting]]:
    """Yields the setting of a dry run, in which ops take the path of a GPU."""
    launches = launches or Launches()

    def run(op: Op, *args: Any) -> None:
        op.check_arguments(*args)
        op.kernels["cuda"](*args)

    def run_once(call: Callable[[], Any], *rest: Any) -> float:
        call()
        return 1.0

    def run_each(calls: Sequence[Callable[[], Any]], repeats: int) -> float:
        for call in calls:
            call()
        return 1.0

    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        # Without a launch, payloads hold what the memory had held.
        warnings.filterwarnings("ignore", "a float16 payload is not finite")
        for target, name, value in (
            (cuda, "launch", launches),
            (Op, "__call__", run),
            (timing, "milliseconds", run_each),
            (timing, "replayed", run_once),
            (timing, "host_microseconds", run_once),
            (timing, "behind_a_sleep", run_once),
        ):
            stack.enter_context(mock.patch.object(target, name, value))
        yield lambda out: Setting(out, device="cpu", repeats=1, large=ENTRIES, small=ENTRIES)
