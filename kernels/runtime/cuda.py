"""Compiles CUDA kernels with NVRTC, keeps cubins on disk, and launches them with CuPy.

This is the only module that imports CuPy. A kernel is named by its file and a C++ name such as
``quantize<Int8, float, 256>``.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from ddp_core.exchange.errors import Error

from .arguments import as_ctypes

__all__ = ["DTYPES", "Cubin", "CudaCompileError", "compile_cubin", "grid_for", "launch", "missing"]

# Denormals are kept and multiply-adds are not contracted, so that kernels equal their definitions
# bit for bit. ptxas reports spilled registers, which are a failure of the tests.
OPTIONS = ("-std=c++17", "-fmad=false", "--ftz=false", "-Xptxas=-v")
DTYPES = {torch.float32: "float", torch.float16: "Half", torch.bfloat16: "BFloat16"}
_THREADS = 256
_WARPS_PER_BLOCK = _THREADS // 32
_CAPABILITY = (8, 0)  # reductions over a warp in one instruction
_WARPS_PER_SM = 64  # resident on A100, H100 and B200; 48 on consumer GPUs


class CudaCompileError(Error, RuntimeError):
    """Raised where NVRTC refuses a kernel; the message contains its log."""


@dataclass(frozen=True)
class Cubin:
    """Holds machine code for one architecture.

    Attributes:
        code: the cubin.
        names: mangled names of the kernels by their C++ names.
        log: the compiler's messages.
    """

    code: bytes
    names: dict[str, str]
    log: str


@cache
def missing() -> str | None:
    """Returns why CUDA kernels cannot run; None if they can."""
    if torch.version.cuda is None:
        return "this torch was built without CUDA"
    major = int(torch.version.cuda.split(".")[0])
    # Names the packages rather than an extra of commhooks, which is on no package index.
    nvrtc = f"'nvidia-cuda-nvrtc>={major},<{major + 1}'" if major > 12 else "nvidia-cuda-nvrtc-cu12"
    install = f"pip install cupy-cuda{major}x {nvrtc}"
    try:
        import cupy  # noqa: F401  # not at the top: CuPy is optional
    except ImportError as error:
        return f"CuPy cannot be imported ({error}): {install}"
    try:
        _nvrtc()
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
    """Stands for a stream of CuPy, of which a launch reads the pointer alone.

    ``cupy.cuda.ExternalStream`` is deprecated since CuPy 14 and warns at every launch, and as a
    context it costs more host time than the launch.
    """

    ptr: int


# Torch's public functions build an object or look at its initialisation first, which costs more
# than the launch; the two below are what its compiler calls. A torch without CUDA has neither.
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
_current_stream: Callable[[int], int] = getattr(
    torch._C,
    "_cuda_getCurrentRawStream",
    lambda index: torch.cuda.current_stream(index).cuda_stream,
)


def launch(
    source: str,
    name: str,
    device: torch.device,
    work: int,
    arguments: Sequence[Tensor | float | None],
    rows: int = 1,
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
    """
    index = device.index or 0
    if index != _current_device():
        with torch.cuda.device(index):
            return launch(source, name, device, work, arguments, rows)
    # CuPy has a current stream of its own. Torch's allocator reuses memory in the order of torch's
    # stream, and a kernel on another one would race with it; capturing a graph would fail as well.
    stream = _Stream(_current_stream(index))
    values = tuple([_CONVERSIONS.get(type(value), _as_cupy)(value) for value in arguments])
    grid = grid_for(work, index, rows)
    _function(source, name, index)(grid, (_THREADS,), values, stream=stream)


def grid_for(work: int, device_index: int, rows: int = 1) -> tuple[int, int]:
    """Returns the grid of blocks of 256 threads for ``work`` warps in each of ``rows`` rows.

    At most twice as many as the device holds at once: kernels stride over the grid, and more blocks
    would repeat what a warp does once, such as reading the step or a table of levels.
    """
    most = -(-_most_blocks(device_index) // rows)
    return min(-(-work // _WARPS_PER_BLOCK) or 1, most), rows


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
def _function(source: str, name: str, device_index: int) -> Any:
    import cupy

    # Machine code belongs to a context, so it is loaded once per device and process.
    cubin = _cached_cubin(
        source, name, architecture_of(torch.cuda.get_device_capability(device_index))
    )
    with cupy.cuda.Device(device_index):
        module = cupy.cuda.function.Module()
        module.load(cubin.code)
        return module.get_function(cubin.names[name])


# Compilation ----------------------------------------------------------------------------------


def _cached_cubin(source: str, name: str, architecture: str) -> Cubin:
    """Returns the cubin from the folder ``COMMHOOKS_CACHE``, or compiles and stores it there."""
    # The key covers all headers, whether included or not, so that no cubin is stale.
    parts = [source, name, architecture, *OPTIONS, str(_nvrtc_version())]
    key = hashlib.blake2b("\0".join([*parts, *_texts(source)]).encode(), digest_size=16).hexdigest()
    # Without a home, or with one that cannot be read or written, every process compiles again, a
    # second per kernel.
    with suppress(OSError, RuntimeError):
        lowered, _, code = (_cache_folder() / f"{key}.cubin").read_bytes().partition(b"\0")
        return Cubin(code, {name: lowered.decode()}, "")
    cubin = compile_cubin(source, [name], architecture)
    with suppress(OSError, RuntimeError):
        folder = _cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
            file.write(cubin.names[name].encode() + b"\0" + cubin.code)
        # Atomic: another process reads all of the file or none.
        os.replace(file.name, folder / f"{key}.cubin")
    return cubin


def _cache_folder() -> Path:
    """Returns the folder of compiled kernels; raises RuntimeError where no home is known."""
    return Path(os.environ.get("COMMHOOKS_CACHE") or Path.home() / ".cache" / "commhooks")


def _folder() -> Path:
    return Path(str(resources.files("commhooks.kernels")))


def _texts(source: str) -> list[str]:
    headers = sorted((_folder() / "include").glob("*.h"))
    return [source_text(source), *(path.read_text() for path in headers)]


_INLINE: dict[str, str] = {}  # source text that lies in no file, by its name


def add_source(name: str, text: str) -> str:
    """Registers source text under a name, which then stands for a file's name."""
    # #line: errors of the compiler count from the first line of the text as its author wrote it.
    _INLINE[name] = f'#include "include/cuda.h"\n#line 1 "{name}"\n{text}'
    return name


def source_text(source: str) -> str:
    return _INLINE[source] if source in _INLINE else (_folder() / source).read_text()


def compile_cubin(source: str, names: Sequence[str], architecture: str) -> Cubin:
    """Compiles kernels of a file, without a GPU or a driver.

    Args:
        source: name of the ``.cu`` file.
        names: the kernels, with their template arguments.
        architecture: such as "90" for machine code, "compute_90" for PTX.

    Raises:
        CudaCompileError: NVRTC refuses the source; the message contains its log.
    """
    return compile_text(source_text(source), source, names, architecture)


def compile_text(text: str, file: str, names: Sequence[str], architecture: str) -> Cubin:
    """Compiles kernels of a source text; otherwise as ``compile_cubin``."""
    library = _nvrtc()
    program = ctypes.c_void_p()
    _check(
        library.nvrtcCreateProgram(
            ctypes.byref(program), text.encode(), file.encode(), 0, None, None
        )
    )
    try:
        # A template is compiled only where something names it; NVRTC also tells the mangled names.
        for name in names:
            _check(library.nvrtcAddNameExpression(program, name.encode()))
        # sm_ gives machine code; compute_ gives PTX, which the driver has to compile.
        as_ptx = architecture.startswith("compute_")
        target = architecture if as_ptx else f"sm_{architecture}"
        options = [f"-arch={target}", f"-I{_folder()}", *OPTIONS]
        array = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        failed = library.nvrtcCompileProgram(program, len(options), array)
        log = _text(program, library.nvrtcGetProgramLogSize, library.nvrtcGetProgramLog).decode()
        if failed:
            raise CudaCompileError(f"{file} does not compile for {target}:\n{log}")
        lowered = {}
        for name in names:
            mangled = ctypes.c_char_p()
            _check(library.nvrtcGetLoweredName(program, name.encode(), ctypes.byref(mangled)))
            lowered[name] = (mangled.value or b"").decode()
        if as_ptx:  # a text, of which the driver finds the end by its zero
            code = _text(program, library.nvrtcGetPTXSize, library.nvrtcGetPTX) + b"\0"
        else:
            of_code = library.nvrtcGetCUBINSize, library.nvrtcGetCUBIN
            code = _text(program, *of_code, zero_ended=False)
        return Cubin(code, lowered, log)
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _text(program: Any, size_of: Any, read: Any, *, zero_ended: bool = True) -> bytes:
    size = ctypes.c_size_t()
    _check(size_of(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(read(program, buffer))
    return buffer.raw[: size.value - 1] if zero_ended else buffer.raw


def _check(status: int) -> None:
    if status:
        get = _nvrtc().nvrtcGetErrorString
        get.restype = ctypes.c_char_p
        raise CudaCompileError(f"NVRTC: {get(status).decode()}")


@cache
def _nvrtc() -> Any:
    """Loads the NVRTC of torch's CUDA version; any installed one if torch has no CUDA.

    A driver that is right for torch may refuse cubins of a later major version.
    """
    major = torch.version.cuda.split(".")[0] if torch.version.cuda else "*"
    if major != "*":
        try:
            return ctypes.CDLL(f"libnvrtc.so.{major}")  # already loaded by torch
        except OSError:
            pass
    for folder in map(Path, sys.path):
        for path in sorted(folder.glob(f"nvidia/*/lib/libnvrtc.so.{major}")):
            # NVRTC opens this library by its name alone, and the wheel of CUDA 13 does not say
            # where it lies.
            for builtins in path.parent.glob("libnvrtc-builtins.so.*"):
                ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
            return ctypes.CDLL(str(path))
    raise OSError(f"NVRTC of CUDA {major} is not installed")


def architecture_of(capability: tuple[int, int]) -> str:
    """Returns the target of this NVRTC for a device's compute capability.

    That is machine code where NVRTC knows the device. For a newer one the driver compiles PTX;
    machine code of an earlier device would run on some of them only (not across Tegra).
    """
    device, known = 10 * capability[0] + capability[1], _known_architectures()
    return str(device) if device in known else f"compute_{max(n for n in known if n <= device)}"


@cache
def _known_architectures() -> list[int]:
    count = ctypes.c_int()
    _check(_nvrtc().nvrtcGetNumSupportedArchs(ctypes.byref(count)))
    numbers = (ctypes.c_int * count.value)()
    _check(_nvrtc().nvrtcGetSupportedArchs(numbers))
    return list(numbers)


@cache
def _nvrtc_version() -> tuple[int, int]:
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(_nvrtc().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    return major.value, minor.value
