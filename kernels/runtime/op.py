"""What an op is: a definition in PyTorch, kernels by device type, and which of them runs."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from . import cpu, cuda
from .arguments import Arguments, check

__all__ = ["Op", "check", "implementations", "op", "use_kernels", "warn_if_missing"]

Same = Iterable[tuple[str, str]]
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

    def __init__(
        self, schema: str, definition: Callable[..., None], caller: str | None, same: Same
    ) -> None:
        self.name = schema.partition("(")[0]
        self.definition = definition
        self.kernels: dict[str, Callable[..., None]] = {}
        self._law: Callable[..., None] | None = None
        self._beyond: Callable[..., bool] | None = None
        _LIBRARY.define(schema)
        _LIBRARY.impl(self.name, self._run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"commhooks::{self.name}", self._pretend, lib=_LIBRARY)
        self._dispatched = getattr(torch.ops.commhooks, self.name)
        declared = self._dispatched.default._schema.arguments
        self._arguments = Arguments(caller or self.name, declared, same)
        _OPS[self.name] = self

    def kernel(self, device_type: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
        """Decorates the function that runs the op on such devices."""

        def add(function: Callable[..., None]) -> Callable[..., None]:
            self.kernels[device_type] = function
            return function

        return add

    def law(self, function: Callable[..., None]) -> Callable[..., None]:
        """Decorates what raises unless the arguments fit: dtypes, devices, sizes, ranges.

        Whoever calls the op, arguments of the schema's kinds come here before anything runs;
        afterwards the op looks whether what is written to overlaps with anything.
        """
        self._law = function
        return function

    def beyond_kernels(self, function: Callable[..., bool]) -> Callable[..., bool]:
        """Decorates what tells arguments that are right, but that the definition has to take."""
        self._beyond = function
        return function

    def __call__(self, *args: Any) -> None:
        """Runs the op where its first argument lies."""
        if torch.compiler.is_compiling():
            self._dispatched(*args)
        elif self._arguments.are_plain(args):
            self._run_plain(args)
        elif any(map(_has_own_dispatch, args)):
            self._dispatched(*args)
        else:
            self._run(*args)

    def _run(self, *args: Any) -> None:
        self._run_plain(self._arguments.converted(args))

    def _run_plain(self, args: tuple[Any, ...]) -> None:
        if self._law is not None:
            self._law(*args)
        device_type = "cpu" if args[0].is_cpu else args[0].device.type  # a tenth of the time
        if self._beyond is not None and self._beyond(*args):
            run = self.definition
        else:
            run = self.implementation(device_type)
        if self._law is None and run is not self.definition:
            self._arguments.check_alike(args)
        if device_type in _MISSING and (self._law is not None or run is not self.definition):
            self._arguments.check_memory(args)
        run(*args)

    def _pretend(self, *args: Any) -> None:
        """For tensors without data. PyTorch comes here as soon as one of them is of "meta"."""
        self._arguments.check_all_or_none_meta(args)

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
        if device_type in self.kernels:
            warn_if_missing(device_type)
        return self.definition

    def missing(self, device_type: str) -> str | None:
        """Why no kernel can run on such devices; None if one can."""
        if device_type not in self.kernels:
            return f"the op has no kernel for {device_type!r}"
        return _MISSING[device_type]()


def _has_own_dispatch(value: Any) -> bool:
    """Whether ``value`` is a tensor of a class that answers to the dispatcher itself."""
    return isinstance(value, Tensor) and (
        type(value).__torch_dispatch__ is not Tensor.__torch_dispatch__
    )


def warn_if_missing(device_type: str = "cpu") -> None:
    """Warns, once in a process, where PyTorch code runs though kernels could: it is far slower.

    Ops call it when they take their definition for want of the library of kernels. Silent where
    ``COMMHOOKS_KERNELS`` asks for definitions.

    Args:
        device_type: "cpu" or "cuda".
    """
    reason = None if _mode == "definition" else _MISSING[device_type]()
    if reason is not None:
        _say_once(device_type, reason)


@cache
def _say_once(device_type: str, reason: str) -> None:
    name = {"cpu": "CPU", "cuda": "CUDA"}[device_type]
    warnings.warn(
        f"commhooks.kernels: PyTorch code runs where {name} kernels could, many times slower: "
        f"{reason}. COMMHOOKS_KERNELS=definition asks for it and says nothing",
        RuntimeWarning,
        stacklevel=5,
    )


_MISSING: dict[str, Callable[[], str | None]] = {"cpu": cpu.missing, "cuda": cuda.missing}


def op(
    schema: str,
    *,
    cuda_source: str | None = None,
    caller: str | None = None,
    same: Same = (),
) -> Callable[[Callable[..., None]], Op]:
    """Decorates the definition of an op.

    Args:
        schema: torch.library's, without the namespace: name, arguments, ``-> ()``. What is written
            to is marked, as in ``Tensor(a!) out``.
        cuda_source: CUDA C++ with a kernel of the op's name, as a template of one type, which is
            that of the first tensor: ``float``, ``Half`` or ``BFloat16``. Its arguments are those
            of the schema (pointers, ``float``, and ``i64`` for integers and bools), and the number
            of entries of the first tensor. ``kernels/include/cuda.h`` is included; a warp should
            have about 256 entries: ``for (i64 at = warp() * 256; at < n; at += warps() * 256)``.
        caller: the function that users call, for messages; the op's name if there is no other.
        same: pairs of arguments that may be one tensor, such as ``("x", "out")``. Kernels share no
            other memory that is written to.

    Example:
        >>> @op("twice(Tensor x, Tensor(a!) out) -> ()", cuda_source=SOURCE)
        ... def twice(x, out):
        ...     out.copy_(2 * x)
    """

    def define(definition: Callable[..., None]) -> Op:
        made = Op(schema, definition, caller, same)
        if cuda_source is not None:
            file = cuda.add_source(f"{made.name} (inline)", cuda_source)
            made.kernels["cuda"] = _inline_kernel(made.name, file)
        return made

    return define


def _inline_kernel(name: str, file: str) -> Callable[..., None]:
    def run(x: Tensor, *args: Any) -> None:
        n, kernel = x.numel(), f"{name}<{cuda.DTYPES[x.dtype]}>"
        cuda.launch(file, kernel, x.device, n // 256 + 1, (x, *args, n))

    return run


def implementations(device_type: str) -> dict[str, str]:
    """By op, what runs on such devices: "kernel", or "definition" with the reason."""
    answers = {}
    for name, one in sorted(_OPS.items()):
        reason = "asked for" if _mode == "definition" else one.missing(device_type)
        answers[name] = "kernel" if reason is None else f"definition: {reason}"
    return answers
