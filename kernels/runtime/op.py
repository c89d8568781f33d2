"""Declares ops: a definition in PyTorch, kernels by device type, and the choice between them."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .._torch import schema_of
from . import cpu, cuda, nvrtc
from .arguments import FEEDBACK, FLOATS, Arguments, Entries, Form, Rule, check, like, wide

__all__ = [
    "FEEDBACK",
    "FLOATS",
    "Entries",
    "Op",
    "Rule",
    "check",
    "current_mode",
    "implementations",
    "like",
    "op",
    "use_kernels",
    "warn_if_missing",
    "wide",
]

Same = Iterable[tuple[str, str]]
MODES = ("auto", "definition", "native")
# Torch drops the registrations of a Library that is garbage collected.
_LIBRARY = torch.library.Library("commhooks", "DEF")
_OPS: dict[str, Op] = {}


_mode = os.environ.get("COMMHOOKS_KERNELS", "auto")


def current_mode() -> str:
    """Returns the mode in which ops run; raises ValueError if the environment names no mode."""
    # Not at import: a command could not answer with a sentence.
    if _mode not in MODES:
        raise ValueError(f"COMMHOOKS_KERNELS is one of {', '.join(MODES)}, got {_mode!r}")
    return _mode


@contextmanager
def use_kernels(mode: str) -> Iterator[None]:
    """Runs ops as under ``COMMHOOKS_KERNELS=mode`` within the context, in all threads.

    Args:
        mode: "definition" runs PyTorch code only; "native" runs kernels and raises where an op has
            none; "auto" runs kernels where they exist.

    Example:
        >>> with use_kernels("definition"):
        ...     quantize(x, payload, "int8", 256)
    """
    # Not a context variable: ops run on autograd's and the lanes' threads, which inherit none.
    global _mode
    if mode not in MODES:
        raise ValueError(f"use_kernels(mode): one of {', '.join(MODES)}, got {mode!r}")
    before, _mode = _mode, mode
    try:
        yield
    finally:
        _mode = before


class Op:
    """Runs one numeric primitive, which writes its results to tensors among its arguments.

    Attributes:
        definition: the op in PyTorch, which is its specification.
        kernels: functions of the same arguments by device type.
    """

    def __init__(
        self,
        schema: str,
        definition: Callable[..., None],
        caller: str | None,
        same: Same,
        takes: Mapping[str, Rule] | None,
    ) -> None:
        self.name = schema.partition("(")[0]
        self.definition = definition
        self.kernels: dict[str, Callable[..., None]] = {}
        _LIBRARY.define(schema)
        # One implementation for all devices: `_run` chooses the kernel. "Explicit": autograd does
        # not differentiate through the definition, as ops write to their arguments.
        _LIBRARY.impl(self.name, self._run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"commhooks::{self.name}", self._pretend, lib=_LIBRARY)
        self._dispatched = getattr(torch.ops.commhooks, self.name)
        declared = schema_of(self._dispatched.default).arguments
        self._arguments = Arguments(caller or self.name, declared, same, takes)
        _OPS[self.name] = self

    def kernel(self, device_type: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
        """Decorates the kernel for a device type."""

        def add(function: Callable[..., None]) -> Callable[..., None]:
            self.kernels[device_type] = function
            return function

        return add

    def check(self, function: Callable[..., None]) -> Callable[..., None]:
        """Decorates the check of rules that ``takes`` cannot state.

        It is called with the arguments that its parameters name, of the schema's types and right by
        the rules; ``*rest`` stands for those that follow. A first parameter ``caller`` is the
        op's name for messages.
        """
        self._arguments.add_check(function)
        return function

    def check_arguments(self, *args: Any) -> None:
        """Raises TypeError or ValueError unless the arguments are as the op declares them.

        Every call does so before anything runs, also through ``torch.ops.commhooks``, and checks
        afterwards that no memory overlaps.
        """
        self._arguments.check_rules(args)

    def beyond_kernels(self, function: Callable[..., bool]) -> Callable[..., bool]:
        """Decorates the test for valid arguments that only the definition takes (float64)."""
        self._arguments.beyond = function
        return function

    def __call__(self, *args: Any) -> None:
        """Runs the op on the device of its first argument."""
        # Torch's dispatcher slows a call down, so only those that have to see the op go through it:
        # a compiler that traces, or a tensor with its own dispatch.
        if torch.compiler.is_compiling():
            self._dispatched(*args)
            return
        arguments = self._arguments
        form = arguments.forms.get(tuple(map(type, args))) or arguments.form_of(args)
        if form is not None:
            self._run_form(args, form)
        elif any(map(_has_own_dispatch, args)):
            self._dispatched(*args)
        else:
            self._run(*args)

    def _run(self, *args: Any) -> None:
        arguments = self._arguments
        form = arguments.form_of(args)
        if form is None:
            args = arguments.converted(args)
            form = arguments.form_of(args) or arguments.new_form(args)
        self._run_form(args, form)

    def _run_form(self, args: tuple[Any, ...], form: Form) -> None:
        arguments = self._arguments
        device_type = "cpu" if args[0].is_cpu else args[0].device.type  # is_cpu costs a tenth of it
        is_free = not arguments.declared and device_type != "meta"
        if is_free and self.implementation(device_type) is self.definition:
            # PyTorch checks by itself, and takes lists, nested tensors and more.
            self.definition(*args)
            return
        beyond, sound = arguments.check(args, form)
        if device_type == "meta":  # tensors without data: nothing is there to be computed
            # Through the dispatcher, where a mode may count what an op would read and write.
            self._dispatched(*args)
            return
        run = self.definition if beyond else self.implementation(device_type)
        # Tensors on other devices, such as "meta", have no memory to look at.
        if arguments.declared or run is not self.definition:
            if not arguments.declared:  # the checks that every kernel needs
                arguments.check_alike(args)
            if not sound and device_type in _MISSING:
                arguments.check_memory(args)
        run(*args)

    def _pretend(self, *args: Any) -> None:
        """Replaces the op where a tensor has no data: there are no results to allocate."""
        # Torch calls this as soon as one tensor is on "meta": with the others on a GPU, the op
        # would silently do nothing.
        self._arguments.check_all_or_none_meta(args)

    def implementation(self, device_type: str) -> Callable[..., None]:
        """Returns the function that runs on a device type in the current mode."""
        if _mode != "auto" and current_mode() == "definition":
            return self.definition
        kernel = self.kernels.get(device_type)
        if kernel is not None and _MISSING[device_type]() is None:
            return kernel
        if _mode == "native":
            reason = self.missing(device_type)
            raise RuntimeError(
                f"commhooks.kernels.{self.name}: COMMHOOKS_KERNELS is 'native', but {reason}"
            )
        if kernel is not None:
            warn_if_missing(device_type)
        return self.definition

    def missing(self, device_type: str) -> str | None:
        """Returns why no kernel can run on a device type; None if one can."""
        if device_type not in self.kernels:
            return f"the op has no kernel for {device_type!r}"
        return _MISSING[device_type]()


def _has_own_dispatch(value: Any) -> bool:
    """Returns whether ``value`` is a tensor of a class with its own ``__torch_dispatch__``."""
    return isinstance(value, Tensor) and (
        type(value).__torch_dispatch__ is not Tensor.__torch_dispatch__
    )


def warn_if_missing(device_type: str = "cpu") -> None:
    """Warns once that PyTorch code runs in place of kernels, many times slower.

    Ops call this where a kernel exists but cannot run. One process of each machine warns, where it
    is known which; there is no warning if ``COMMHOOKS_KERNELS`` asks for definitions.

    Args:
        device_type: "cpu" or "cuda".
    """
    reason = None if current_mode() == "definition" else _MISSING[device_type]()
    if reason is not None and speaks():
        _say_once(device_type, reason)


def speaks() -> bool:
    """Returns whether this process says what every process of this machine could."""
    local_rank = os.environ.get("LOCAL_RANK", "")  # torchrun's
    if local_rank.isdecimal():
        return int(local_rank) == 0
    known = torch.distributed.is_available() and torch.distributed.is_initialized()
    return not known or torch.distributed.get_rank() == 0


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
    takes: Mapping[str, Rule] | None = None,
) -> Callable[[Callable[..., None]], Op]:
    """Decorates the definition of an op.

    Args:
        schema: a schema of ``torch.library`` without the namespace: name, arguments, ``-> ()``.
            Tensors that the op writes to are marked, as in ``Tensor(a!) out``.
        cuda_source: CUDA C++ with a kernel of the op's name, as a template of one type, the type of
            the first tensor: ``float``, ``Half`` or ``BFloat16``. It takes the arguments of the
            schema (pointers, ``float``, and ``i64`` for integers and bools), then the number of
            entries of the first tensor. ``kernels/include/cuda.h`` is included. A warp should take
            about 256 entries: ``for (i64 at = warp() * 256; at < n; at += warps() * 256)``.
        caller: the public function, for messages; the op's name by default.
        same: pairs of arguments that may be the same tensor, such as ``("x", "out")``. No other
            memory that is written to may overlap with another argument.
        takes: what arguments have to be, by their names: ``Entries`` for a tensor, ``range`` for a
            whole number, or a function that reads a table. None: tensors only have to be contiguous
            and on one device.

    Example:
        >>> takes = {"x": Entries(FLOATS), "out": Entries(like("x"), n="x")}
        >>> @op("twice(Tensor x, Tensor(a!) out) -> ()", cuda_source=SOURCE, takes=takes)
        ... def twice(x, out):
        ...     out.copy_(2 * x)
    """

    def define(definition: Callable[..., None]) -> Op:
        declared = Op(schema, definition, caller, same, takes)
        if cuda_source is not None:
            file = nvrtc.add_source(f"{declared.name} (inline)", cuda_source)
            declared.kernels["cuda"] = _inline_kernel(declared.name, file)
        return declared

    return define


def _inline_kernel(name: str, file: str) -> Callable[..., None]:
    def run(x: Tensor, *args: Any) -> None:
        n, kernel = x.numel(), f"{name}<{cuda.DTYPES[x.dtype]}>"
        cuda.launch(file, kernel, x.device, n // 256 + 1, (x, *args, n))

    return run


def implementations(device_type: str) -> dict[str, str]:
    """Returns, by op, what runs on a device type: "kernel", or "definition" with the reason."""
    answers = {}
    for name, known in sorted(_OPS.items()):
        reason = "asked for" if current_mode() == "definition" else known.missing(device_type)
        answers[name] = "kernel" if reason is None else f"definition: {reason}"
    return answers
