"""Launches CUDA kernels with CuPy.

No other module of the library imports CuPy. A kernel is named by its file and a C++ name such as
``quantize<Int8, float, 256>``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from .._torch import current_device, current_stream
from . import nvrtc
from .arguments import as_ctypes

__all__ = ["DTYPES", "counters", "grid_for", "launch", "missing"]

DTYPES = {torch.float32: "float", torch.float16: "Half", torch.bfloat16: "BFloat16"}
_THREADS = 256
_WARPS_PER_BLOCK = _THREADS // 32
_CAPABILITY = (8, 0)  # reductions over a warp in one instruction
_MOST_THREADS = 0  # CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK
_WARPS_PER_SM = 64  # resident on A100, H100 and B200; 48 on consumer GPUs


@cache
def missing() -> str | None:
    """Returns why CUDA kernels cannot run; None if they can."""
    if torch.version.cuda is None:
        return "this torch was built without CUDA"
    major = int(torch.version.cuda.split(".")[0])
    # Names the packages rather than an extra of commhooks, which is on no package index.
    package = (
        f"'nvidia-cuda-nvrtc>={major},<{major + 1}'" if major > 12 else "nvidia-cuda-nvrtc-cu12"
    )
    install = f"pip install cupy-cuda{major}x {package}"
    try:
        import cupy  # noqa: F401  # not at the top: CuPy is optional
    except ImportError as error:
        return f"CuPy cannot be imported ({error}): {install}"
    try:
        nvrtc.load_nvrtc()
    except OSError as error:
        return f"{error}: {install}"
    for index in range(torch.cuda.device_count()):
        capability = torch.cuda.get_device_capability(index)
        if capability < _CAPABILITY:
            model = torch.cuda.get_device_name(index)
            at_least = "{}.{}".format(*_CAPABILITY)
            return (
                f"cuda:{index} ({model}) has compute capability {capability[0]}.{capability[1]}; "
                f"the kernels need {at_least}"
            )
    return None


class _Stream(NamedTuple):
    """Represents a stream of CuPy, of which a launch reads the pointer alone.

    ``cupy.cuda.ExternalStream`` is deprecated since CuPy 14 and warns at every launch, and as a
    context it costs more host time than the launch.
    """

    ptr: int


_stream = cache(_Stream)


def launch(
    source: str,
    name: str,
    device: torch.device,
    work: int,
    arguments: Sequence[Tensor | float | None],
    rows: int = 1,
    *,
    threads: int = _THREADS,
) -> None:
    """Launches a kernel on torch's current stream, without a copy, synchronisation or allocation.

    Args:
        source: name of the ``.cu`` file.
        name: the kernel, with its template arguments.
        device: a CUDA device.
        work: number of warps that the kernel can use, per row.
        arguments: in the kernel's order: tensors for pointers, integers and bools for ``i64``,
            floats for ``float``.
        rows: blocks of the grid in its second dimension: rows of a message.
        threads: of a block.
    """
    index = device.index or 0
    if index != current_device():
        with torch.cuda.device(index):
            return launch(source, name, device, work, arguments, rows, threads=threads)
    # CuPy has a current stream of its own. Torch's allocator reuses memory in the order of torch's
    # stream, and a kernel on another one would race with it; capturing a graph would fail as well.
    stream = _stream(current_stream(index))
    values = tuple(
        [
            value if (kind := type(value)) is int else _CONVERSIONS.get(kind, _as_cupy)(value)
            for value in arguments
        ]
    )
    grid = grid_for(work, index, rows, threads)
    _function(source, name, index, threads)(grid, (threads,), values, stream=stream)


def counters(device: torch.device) -> Tensor:
    """Returns two zeros for kernels whose blocks count themselves; kernels leave zeros behind.

    Each stream has its own: kernels of one stream run one after the other.
    """
    if device.type != "cuda":
        # On the CPU, where the emulator runs kernels, and on a pretended GPU there is one stream.
        return _counters(device, 0)
    index = device.index or 0
    if index != current_device():
        with torch.cuda.device(index):
            return counters(device)
    if torch.cuda.is_current_stream_capturing():
        # A graph runs on any stream, and fills its own at each replay: what is filled in a capture
        # is not filled before the graph runs.
        return torch.zeros(2, dtype=torch.int32, device=device)
    return _counters(device, current_stream(index))


@cache
def _counters(device: torch.device, stream: int) -> Tensor:
    # Filled on the stream of its first kernel, once; a fill in every call would be a launch.
    return torch.zeros(2, dtype=torch.int32, device=device)


def grid_for(
    work: int, device_index: int, rows: int = 1, threads: int = _THREADS
) -> tuple[int, int]:
    """Returns the grid of blocks of ``threads`` for ``work`` warps in each of ``rows`` rows.

    At most twice as many as the device holds at once: kernels stride over the grid, and more blocks
    would repeat what a warp does once, such as reading the step or a table of levels.
    """
    most = -(-_most_blocks(device_index) * _THREADS // (threads * rows))
    return min(-(-work * 32 // threads) or 1, most), rows


@cache
def _most_blocks(device_index: int) -> int:
    return 2 * _processors(device_index) * _WARPS_PER_SM // _WARPS_PER_BLOCK


@cache
def _processors(device_index: int) -> int:
    return torch.cuda.get_device_properties(device_index).multi_processor_count


def _as_cupy(value: Any) -> Any:
    """Converts an argument whose type is not in the table below, or raises TypeError."""
    number = as_ctypes(value)
    return _as_float(number.value) if type(number) is ctypes.c_float else number.value or 0


def _as_float(value: float) -> Any:
    import numpy  # only where CuPy is, which depends on it

    # CuPy passes a Python float as a double, of which a kernel's float would read the lower half.
    return numpy.float32(value)


# CuPy passes Python integers in 64 bits, also for pointers.
_CONVERSIONS: dict[type, Callable[[Any], Any]] = {
    int: int,
    bool: int,
    float: _as_float,
    type(None): lambda _: 0,
    Tensor: Tensor.data_ptr,
    Parameter: Tensor.data_ptr,
}


@cache
def _function(source: str, name: str, device_index: int, threads: int) -> Any:
    import cupy

    # Machine code belongs to a context, so it is loaded once per device and process.
    cubin = nvrtc.cached_cubin(
        source, name, nvrtc.architecture_of(torch.cuda.get_device_capability(device_index))
    )
    with cupy.cuda.Device(device_index):
        module = cupy.cuda.function.Module()
        module.load(cubin.code)
        function = module.get_function(cubin.names[name])
        most = cupy.cuda.driver.funcGetAttribute(_MOST_THREADS, function.ptr)
    if threads > most:
        raise nvrtc.CudaCompileError(
            f"{name} of {source} uses registers or shared memory for blocks of at most {most} "
            f"threads on cuda:{device_index}, and is launched with {threads}"
        )
    return function
