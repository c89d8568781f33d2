"""What an op is: a definition in PyTorch, kernels by device type, and which of them runs."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from . import _cpu, _cuda

__all__ = ["Op", "check", "implementations", "op", "use_kernels"]

MODES = ("auto", "definition", "native")
_LIBRARY = torch.library.Library("commhooks", "DEF")
_OPS: dict[str, Op] = {}


def _mode_from_environment() -> str:
    mode = os.environ.get("COMMHOOKS_KERNELS", "auto")
    if mode not in MODES:
        raise ValueError(f"COMMHOOKS_KERNELS is one of {', '.join(MODES)}, got {mode!r}")
    return mode


_mode = _mode_from_environment()


@contextmanager
def use_kernels(mode: str) -> Iterator[None]:
    """Within it, ops run as ``COMMHOOKS_KERNELS=mode`` says, in all threads.

    Args:
        mode: "definition": PyTorch code only; "native": kernels only, an error where there is
            none; "auto": kernels where there are some.

    Example:
        >>> with use_kernels("definition"):
        ...     quantize(x, payload, "int8", 256)
    """
    global _mode
    if mode not in MODES:
        raise ValueError(f"use_kernels(mode): one of {', '.join(MODES)}, got {mode!r}")
    before, _mode = _mode, mode
    try:
        yield
    finally:
        _mode = before


class Op:
    """One numeric primitive, which writes its results to tensors it is given.

    Attributes:
        definition: PyTorch code, the specification.
        kernels: functions of the same arguments, by device type.
    """

    def __init__(self, schema: str, definition: Callable[..., None]) -> None:
        self.name = schema.partition("(")[0]
        self.definition = definition
        self.kernels: dict[str, Callable[..., None]] = {}
        _LIBRARY.define(schema)
        _LIBRARY.impl(self.name, self._run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"commhooks::{self.name}", lambda *_: None, lib=_LIBRARY)
        arguments = getattr(torch.ops.commhooks, self.name).default._schema.arguments
        self._floats = [i for i, one in enumerate(arguments) if str(one.type) == "float"]
        _OPS[self.name] = self

    def kernel(self, device_type: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
        """Decorates the function that runs the op on such devices."""

        def add(function: Callable[..., None]) -> Callable[..., None]:
            self.kernels[device_type] = function
            return function

        return add

    def __call__(self, *args: Any) -> None:
        """Runs the op where its first argument lies."""
        if torch.compiler.is_compiling():
            getattr(torch.ops.commhooks, self.name)(*args)
        else:
            self._run(*args)

    def _run(self, *args: Any) -> None:
        # Kernels take numbers as they are: an integer is not read as a float.
        if any(type(args[i]) is not float for i in self._floats):
            args = tuple(float(a) if i in self._floats else a for i, a in enumerate(args))
        self.implementation(args[0].device.type)(*args)

    def implementation(self, device_type: str) -> Callable[..., None]:
        """What runs on such devices now."""
        if _mode == "definition":
            return self.definition
        reason = self.missing(device_type)
        if reason is None:
            return self.kernels[device_type]
        if _mode == "native":
            raise RuntimeError(
                f"commhooks.kernels.{self.name}: COMMHOOKS_KERNELS is 'native', but {reason}"
            )
        if device_type == "cuda" and device_type in self.kernels:
            _say_once(f"commhooks.kernels: PyTorch code runs where CUDA kernels could: {reason}")
        return self.definition

    def missing(self, device_type: str) -> str | None:
        """Why no kernel can run on such devices; None if one can."""
        if device_type not in self.kernels:
            return f"the op has no kernel for {device_type!r}"
        return _MISSING[device_type]()


@cache
def _say_once(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=4)


_MISSING: dict[str, Callable[[], str | None]] = {"cpu": _cpu.missing, "cuda": _cuda.missing}


def op(schema: str, *, cuda_source: str | None = None) -> Callable[[Callable[..., None]], Op]:
    """Decorates the definition of an op.

    Args:
        schema: torch.library's, without the namespace: name, arguments, ``-> ()``. What is written
            to is marked, as in ``Tensor(a!) out``.
        cuda_source: CUDA C++ with a kernel of the op's name, as a template of one type, which is
            that of the first tensor: ``float``, ``Half`` or ``BFloat16``. Its arguments are those
            of the schema (pointers, ``float``, and ``i64`` for integers and bools), and the number
            of entries of the first tensor. ``kernels/include/cuda.h`` is included; a warp should
            have about 256 entries: ``for (i64 at = warp() * 256; at < n; at += warps() * 256)``.

    Example:
        >>> @op("twice(Tensor x, Tensor(a!) out) -> ()", cuda_source=SOURCE)
        ... def twice(x, out):
        ...     out.copy_(2 * x)
    """

    def define(definition: Callable[..., None]) -> Op:
        made = Op(schema, definition)
        if cuda_source is not None:
            file = _cuda.add_source(f"{made.name} (inline)", cuda_source)
            made.kernels["cuda"] = _inline_kernel(made.name, file)
        return made

    return define


def _inline_kernel(name: str, file: str) -> Callable[..., None]:
    def run(x: Tensor, *args: Any) -> None:
        n, kernel = x.numel(), f"{name}<{_cuda.DTYPES[x.dtype]}>"
        _cuda.launch(file, kernel, x.device, n // 256 + 1, (x, *args, n))

    return run


def implementations(device_type: str) -> dict[str, str]:
    """By op, what runs on such devices: "kernel", or "definition" with the reason."""
    answers = {}
    for name, one in sorted(_OPS.items()):
        reason = "asked for" if _mode == "definition" else one.missing(device_type)
        answers[name] = "kernel" if reason is None else f"definition: {reason}"
    return answers


def check(
    caller: str,
    name: str,
    tensor: Tensor,
    *,
    like: Tensor,
    dtypes: Collection[torch.dtype],
    n: int | None = None,
) -> None:
    """Raises unless ``tensor`` can be an argument of an op.

    Args:
        caller, name: the function and its argument, for the message.
        like: it lies on this tensor's device.
        dtypes: those it may have.
        n: its number of entries, if that is given.
    """
    if tensor.dtype not in dtypes:
        allowed = ", ".join(str(dtype) for dtype in dtypes)
        raise TypeError(f"{caller}({name}): dtype is one of {allowed}, got {tensor.dtype}")
    if tensor.device != like.device:
        raise ValueError(
            f"{caller}({name}): all on one device, got {tensor.device} and {like.device}"
        )
    if not tensor.is_contiguous():
        raise ValueError(f"{caller}({name}): contiguous, got strides {tensor.stride()}")
    if n is not None and tensor.numel() != n:
        raise ValueError(f"{caller}({name}): {n} entries, got {tensor.numel()}")
