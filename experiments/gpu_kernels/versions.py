"""Lists facts about the machine, one launch, and the host's time per launch."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import torch

from commhooks.cli._doctor import one_launch
from commhooks.kernels import use_kernels
from commhooks.kernels.finite import finite_op
from commhooks.kernels.runtime import cuda, nvrtc
from experiments.gpu_kernels import timing
from experiments.gpu_kernels.table import Setting, Step

__all__ = ["COLUMNS", "steps"]

COLUMNS = ("value",)
LAUNCHES = 200  # in a row, for the time of one
_QUERY = "driver_version,clocks.sm,clocks.max.sm,clocks.max.mem,ecc.mode.current,power.limit"


def steps(setting: Setting) -> Iterator[Step]:
    """Yields a step per fact."""
    facts: dict[str, Callable[[], Any]] = {
        "device": torch.cuda.get_device_name,
        "compute capability": lambda: "{}.{}".format(*torch.cuda.get_device_capability()),
        "multiprocessors": lambda: torch.cuda.get_device_properties(0).multi_processor_count,
        "memory, GiB": lambda: torch.cuda.get_device_properties(0).total_memory / 2**30,
        "torch": lambda: torch.__version__,
        "CUDA of torch": lambda: torch.version.cuda,
        "NVRTC": lambda: ".".join(map(str, nvrtc._nvrtc_version())),
        "NCCL": lambda: ".".join(map(str, torch.cuda.nccl.version())),
        "CuPy": _cupy,
        "numpy": lambda: importlib.metadata.version("numpy"),
        "Python": platform.python_version,
        _QUERY: lambda: _nvidia_smi(_QUERY),
        "one launch": one_launch,
        "copy, GB/s": lambda: _copy(setting),
        "a launch on the host, microseconds": _launch_cost,
        "an op on the host, microseconds": _op_cost,
    }
    for name, find in facts.items():
        yield Step(name, lambda find=find: {"value": find()})


def _cupy() -> str:
    import cupy

    return str(cupy.__version__)


def _nvidia_smi(query: str) -> str:
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    return done.stdout.strip()


def _copy(setting: Setting) -> float:
    """Returns the gigabytes per second that a copy of a large bucket reads and writes."""
    pairs = [torch.randn(2, setting.large, device=setting.device) for _ in range(3)]
    copies = [lambda pair=pair: pair[1].copy_(pair[0]) for pair in pairs]
    return 8 * setting.large / timing.milliseconds(copies, setting.repeats) / 1e6


def _launch_cost() -> float:
    x = torch.zeros(32, device="cuda")
    finite = torch.ones((), dtype=torch.bool, device="cuda")
    arguments = (x, x.numel(), finite, cuda.counters(x.device))
    return timing.host_microseconds(
        lambda: cuda.launch("finite.cu", "finite<float>", x.device, 1, arguments), 9, LAUNCHES
    )


def _op_cost() -> float:
    x = torch.zeros(32, device="cuda")
    finite = torch.ones((), dtype=torch.bool, device="cuda")
    with use_kernels("native"):
        return timing.host_microseconds(lambda: finite_op(x, finite), 9, LAUNCHES)
