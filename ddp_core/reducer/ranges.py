"""Named ranges in a profile; they cost a flag where no profiler runs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from ddp_core._torch import profiler_runs

__all__ = ["named_range"]

_NOTHING = nullcontext()


def named_range(name: str, bucket: int | None = None) -> AbstractContextManager[object]:
    """Returns a range of the profiler, if one runs.

    Args:
        bucket: whose range it is, if it is one's.
    """
    # Asked at every call: `record_function` itself takes microseconds without a profiler, too.
    if not profiler_runs():
        return _NOTHING
    title = name if bucket is None else f"{name}: bucket {bucket}"
    return torch.autograd.profiler.record_function(f"DistributedDataParallel.{title}")
