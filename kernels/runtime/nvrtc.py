"""Compiles CUDA kernels with NVRTC, without a GPU or a driver, and keeps cubins on disk."""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from ddp_core.exchange._errors import Error

__all__ = [
    "OPTIONS",
    "Cubin",
    "CudaCompileError",
    "add_source",
    "architecture_of",
    "cache_folder",
    "cached_cubin",
    "compile_cubin",
    "compile_text",
    "load_nvrtc",
    "source_text",
]

# Denormals are kept and multiply-adds are not contracted, so that kernels equal their definitions
# bit for bit. With -v ptxas reports spilled registers, on which tests fail.
OPTIONS = ("-std=c++17", "-fmad=false", "--ftz=false", "-Xptxas=-v")


class CudaCompileError(Error, RuntimeError):
    """Raised when NVRTC rejects a kernel, or makes code that cannot be launched."""


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


def cached_cubin(source: str, name: str, architecture: str) -> Cubin:
    """Returns the cubin from the folder ``COMMHOOKS_CACHE``, or compiles and stores it there."""
    # The key covers all headers, whether included or not, so that no cubin is stale.
    parts = [source, name, architecture, *OPTIONS, str(_nvrtc_version())]
    key = _digest("\0".join([*parts, *_all_sources(source)]).encode()).hex()
    # Without a home directory, or if it cannot be read or written, every process compiles again,
    # which takes a second per kernel.
    with suppress(OSError, RuntimeError):
        data = (cache_folder() / f"{key}.cubin").read_bytes()
        # After a crash of the machine a file may have its name and none of its bytes.
        if data[:_DIGEST] == _digest(data[_DIGEST:]):
            lowered, _, code = data[_DIGEST:].partition(b"\0")
            return Cubin(code, {name: lowered.decode()}, "")
    cubin = compile_cubin(source, [name], architecture)
    with suppress(OSError, RuntimeError):
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        content = cubin.names[name].encode() + b"\0" + cubin.code
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            file = Path(temporary, "cubin")
            file.write_bytes(_digest(content) + content)
            # Atomic: another process reads all of the file or none.
            os.replace(file, folder / f"{key}.cubin")
    return cubin


_DIGEST = 16  # bytes


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_DIGEST).digest()


def cache_folder() -> Path:
    """Returns the folder of compiled kernels; raises RuntimeError without a home directory."""
    return Path(os.environ.get("COMMHOOKS_CACHE") or Path.home() / ".cache" / "commhooks")


def _folder() -> Path:
    return Path(str(resources.files("commhooks.kernels")))


def _all_sources(source: str) -> list[str]:
    headers = sorted((_folder() / "include").glob("*.h"))
    return [source_text(source), *(path.read_text() for path in headers)]


_INLINE: dict[str, str] = {}  # source texts without a file, by name


def add_source(name: str, text: str) -> str:
    """Registers source text under a name, which can then be used as a file name."""
    # #line: in the compiler's messages, line 1 is the first line of ``text``.
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
    """Compiles kernels of a source text, as ``compile_cubin`` does those of a file."""
    library = load_nvrtc()
    program = ctypes.c_void_p()
    _check(
        library.nvrtcCreateProgram(
            ctypes.byref(program), text.encode(), file.encode(), 0, None, None
        )
    )
    try:
        # A template is compiled only where something names it; NVRTC also gives the mangled names.
        for name in names:
            _check(library.nvrtcAddNameExpression(program, name.encode()))
        # sm_ gives machine code; compute_ gives PTX, which the driver has to compile.
        as_ptx = architecture.startswith("compute_")
        target = architecture if as_ptx else f"sm_{architecture}"
        options = [f"-arch={target}", f"-I{_folder()}", *OPTIONS]
        array = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        failed = library.nvrtcCompileProgram(program, len(options), array)
        log = _read(program, library.nvrtcGetProgramLogSize, library.nvrtcGetProgramLog).decode()
        if failed:
            raise CudaCompileError(f"{file} does not compile for {target}:\n{log}")
        lowered = {}
        for name in names:
            mangled = ctypes.c_char_p()
            _check(library.nvrtcGetLoweredName(program, name.encode(), ctypes.byref(mangled)))
            lowered[name] = (mangled.value or b"").decode()
        if as_ptx:  # PTX is text, which the driver takes with its terminating zero
            code = _read(program, library.nvrtcGetPTXSize, library.nvrtcGetPTX) + b"\0"
        else:
            getters = library.nvrtcGetCUBINSize, library.nvrtcGetCUBIN
            code = _read(program, *getters, zero_terminated=False)
        return Cubin(code, lowered, log)
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _read(program: Any, size_of: Any, read: Any, *, zero_terminated: bool = True) -> bytes:
    size = ctypes.c_size_t()
    _check(size_of(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(read(program, buffer))
    return buffer.raw[: size.value - 1] if zero_terminated else buffer.raw


def _check(status: int) -> None:
    if status:
        get = load_nvrtc().nvrtcGetErrorString
        get.restype = ctypes.c_char_p
        raise CudaCompileError(f"NVRTC: {get(status).decode()}")


@cache
def load_nvrtc() -> Any:
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
            # NVRTC opens this library by its file name, and the wheel of CUDA 13 gives no path.
            for builtins in path.parent.glob("libnvrtc-builtins.so.*"):
                ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
            return ctypes.CDLL(str(path))
    raise OSError(f"NVRTC{'' if major == '*' else f' of CUDA {major}'} is not installed")


def architecture_of(capability: tuple[int, int]) -> str:
    """Returns the architecture to compile for, by a device's compute capability.

    That is the device's own (machine code) where NVRTC knows it. For a newer device the driver
    compiles PTX: machine code for an earlier device would not run on all of them (Tegra).
    """
    device, known = 10 * capability[0] + capability[1], _known_architectures()
    return str(device) if device in known else f"compute_{max(n for n in known if n <= device)}"


@cache
def _known_architectures() -> list[int]:
    count = ctypes.c_int()
    _check(load_nvrtc().nvrtcGetNumSupportedArchs(ctypes.byref(count)))
    numbers = (ctypes.c_int * count.value)()
    _check(load_nvrtc().nvrtcGetSupportedArchs(numbers))
    return list(numbers)


@cache
def _nvrtc_version() -> tuple[int, int]:
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(load_nvrtc().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    return major.value, minor.value
