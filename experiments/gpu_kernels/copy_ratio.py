"""Compares the time of every op with that of a copy of the same bucket.

``share`` is the bandwidth of an op, counting the bytes that it has to move, over that of the copy;
``goal`` is what it should reach, and ``predicted`` what was expected before the first measurement.
Buckets of 256 MiB take turns, so that nothing is found in the cache. A bucket of 25 MiB, which fits
into it, is timed in the replay of a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch

from commhooks.kernels import use_kernels
from experiments.gpu_kernels import timing
from experiments.gpu_kernels.predictions import predicted
from experiments.gpu_kernels.table import Setting, Step
from experiments.tools.kernel_cases import COPIED, Case, cases

__all__ = ["COLUMNS", "COMPILED_COLUMNS", "compiled_steps", "steps"]

ROTATING = 3  # large buckets that take turns
COLUMNS = ("op", "bucket", "microseconds", "GB/s", "share", "predicted", "goal")
COLUMNS += ("definition over kernel", "rival", "rival over kernel")
COMPILED_COLUMNS = ("op", "kernel microseconds", "compiled over kernel", "eager over kernel")


def steps(setting: Setting) -> Iterator[Step]:
    """Yields a step per op and size of bucket."""
    large = cache(lambda: _copy(setting))
    for group in _groups(setting):
        yield _step(setting, group, "256 MiB", setting.large, large)
    x = torch.randn(setting.small, device=setting.device)
    y = torch.empty_like(x)
    small = cache(lambda: timing.replayed(lambda: y.copy_(x), setting.repeats))
    for case in cases(x):
        yield _step(setting, [case], "25 MiB", setting.small, small)


def _groups(setting: Setting) -> list[list[Case]]:
    """Returns each op on all of the large buckets."""
    buckets = [torch.randn(setting.large, device=setting.device) for _ in range(ROTATING)]
    return [list(group) for group in zip(*map(cases, buckets), strict=True)]


def _copy(setting: Setting) -> float:
    pairs = [torch.randn(2, setting.large, device=setting.device) for _ in range(ROTATING)]
    copies = [lambda pair=pair: pair[1].copy_(pair[0]) for pair in pairs]
    return timing.milliseconds(copies, setting.repeats)


def _step(
    setting: Setting, group: list[Case], size: str, entries: int, copy: Callable[[], float]
) -> Step:
    case = group[0]

    def run() -> dict[str, Any]:
        with use_kernels("native"):
            if len(group) == 1:
                took = timing.replayed(case.run, setting.repeats)
            else:
                took = timing.milliseconds([case.run for case in group], setting.repeats)
            row = {
                "op": case.name,
                "bucket": size,
                "microseconds": took * 1e3,
                "GB/s": case.bytes * entries / took / 1e6,
                "share": case.bytes / COPIED * copy() / took,
                "predicted": predicted(case.name, size),
                "goal": case.goal,
            }
            if len(group) > 1:
                row["definition over kernel"] = timing.milliseconds([case.define], 3) / took
                for name, call in case.rivals.items():
                    row["rival"] = name
                    row["rival over kernel"] = timing.milliseconds([call], 5) / took
        return row

    return Step(f"{case.name}, {size}", run)


def compiled_steps(setting: Setting) -> Iterator[Step]:
    """Yields a step per op: its definition by torch.compile, on one bucket of 25 MiB."""
    for case in cases(torch.randn(setting.small, device=setting.device)):
        yield Step(case.name, lambda case=case: _compiled(case, setting))


def _compiled(case: Case, setting: Setting) -> dict[str, Any]:
    torch.compiler.reset()  # or the number of recompilations is exceeded
    with use_kernels("native"):
        took = timing.milliseconds([case.run], setting.repeats)
        compiled = timing.milliseconds([torch.compile(case.define)], 5)
        return {
            "op": case.name,
            "kernel microseconds": took * 1e3,
            "compiled over kernel": compiled / took,
            "eager over kernel": timing.milliseconds([case.define], 3) / took,
        }
