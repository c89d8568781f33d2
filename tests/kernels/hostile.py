"""Calls every op with arguments that are wrong in one place; a program of its own.

``python -m tests.kernels.hostile``: whatever comes has to be refused by a Python exception, or be
right. It prints "done" if the process lives to the end, and what was taken though it must not be.
``tests.kernels.fuzz cpu`` makes the same calls of kernels compiled with sanitizers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from commhooks.kernels.runtime import op as _op
from tests.kernels.calls import CALLS

INTEGERS = (-1, 0, 1, 2, 33, 2**31, 2**62, 2**63 - 1, -(2**63), 2**64 - 1, 2**70)
NO_INTEGERS = (1.5, 256.0, True, "1", None, [1], numpy.float64(2), numpy.bool_(True), float("nan"))
NO_FLOATS = ("1", None, True, [1.0], numpy.bool_(True), 1j, torch.ones(3))
# `finite` looks at tensors of any kind by its definition; a table lies on the CPU always.
ANY_TENSOR = {("finite", "x")}
ANY_DEVICE = {*ANY_TENSOR, ("orthonormalize", "left"), ("hash_parts", "x")}
# Bits of any size are hashed.
INTEGER_DTYPES, ANY_INTEGERS = ("torch.uint8", "torch.int16", "torch.int64"), ("hash_parts", "x")


class Wrapper(Tensor):
    """A tensor without memory of its own."""

    @staticmethod
    def __new__(cls, like: Tensor) -> Wrapper:
        return Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype)

    @classmethod
    def __torch_dispatch__(cls, *args: Any, **kwargs: Any) -> Any:
        return NotImplemented


def misaligned(x: Tensor) -> Tensor:
    data = bytearray(x.nbytes + 16)
    return torch.frombuffer(data, dtype=x.dtype, count=x.numel(), offset=1).view(x.shape)


def without_memory(x: Tensor, left: int) -> Tensor:
    empty = x.clone()
    empty.untyped_storage().resize_(left)
    return empty


def strided(x: Tensor) -> Tensor:
    return torch.stack([x, x], -1)[..., 0]


def wrong_tensors(x: Tensor) -> Iterator[tuple[str, Any]]:
    """Values that a kernel must not get in place of ``x``."""
    yield from (("number", 3), ("text", "x"), ("list", [1.0]), ("numpy", numpy.ones(3)))
    yield "meta", x.to("meta")
    yield "sparse", torch.zeros(4, 4).to_sparse()
    if x.numel():
        yield "without memory", without_memory(x, 0)
        yield "of less memory", without_memory(x, x.nbytes - 1)
    if x.numel() > 1:
        yield "strided", strided(x)
        yield "expanded", x.flatten()[:1].expand(x.numel()).view(x.shape)
    if x.itemsize > 1 and x.numel():
        yield "misaligned", misaligned(x)
    for dtype in (torch.complex64, torch.bool, torch.int64, torch.uint8, torch.int16):
        if dtype != x.dtype:
            yield str(dtype), x.to(dtype)


def odd_tensors(x: Tensor) -> Iterator[tuple[str, Any]]:
    """Values that may do for ``x`` or not."""
    yield from (
        ("None", None),
        ("empty", x.flatten()[:0]),
        ("number", torch.zeros((), dtype=x.dtype)),
    )
    yield "shorter", x.flatten()[:-1].clone()
    yield "longer", torch.cat([x.flatten()] * 2)
    yield "wrapper", Wrapper(x)
    with FakeTensorMode():
        fake = torch.empty(x.shape, dtype=x.dtype)
    yield "fake", fake
    for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.float32, torch.int32):
        yield str(dtype), x.to(dtype)
    if not x.dtype.is_floating_point:
        yield "random", torch.randint(-(2**7), 2**7, x.shape).to(x.dtype)
    if x.dtype in (torch.int32, torch.int64):
        yield "large", torch.full_like(x, torch.iinfo(x.dtype).max)
        yield "small", torch.full_like(x, torch.iinfo(x.dtype).min)


def variants(name: str, kind: str, argument: str, value: Any) -> Iterator[tuple[str, Any, bool]]:
    """Values for an argument's place, by a word, and whether they have to be refused."""
    if isinstance(value, Tensor):
        for words, wrong in wrong_tensors(value):
            fits = (name, argument) in (ANY_DEVICE if words == "meta" else ANY_TENSOR)
            fits |= (name, argument) == ANY_INTEGERS and words in INTEGER_DTYPES
            yield words, wrong, not (isinstance(wrong, Tensor) and fits)
        for words, unusual in odd_tensors(value):
            yield words, unusual, False
    elif kind == "bool":
        yield from (
            (repr(substitute), substitute, True)
            for substitute in (0, 1.0, "no", None, torch.tensor(True))
        )
    elif kind == "int":
        yield from (
            (repr(substitute), substitute, False) for substitute in (*INTEGERS, numpy.int64(7))
        )
        yield from ((repr(integer), integer, True) for integer in NO_INTEGERS)
    elif kind == "float":
        odd = (float("nan"), float("inf"), 1e300, 2**70, 10**400, numpy.float32(0.5))
        yield from ((repr(substitute)[:9], substitute, False) for substitute in odd)
        yield from ((repr(float), float, True) for float in NO_FLOATS)
    elif kind == "str":
        yield from (
            (repr(substitute), substitute, True) for substitute in ("", "nope", "int8\0", 3, None)
        )
        yield from ((substitute, substitute, False) for substitute in ("mx_e4m3", "sign", "e5m2"))


def overlapping(args: list[Any], i: int, j: int) -> Tensor:
    """A tensor like argument j that begins an entry into argument i."""
    first, other = args[i], args[j]
    whole = torch.zeros(first.nbytes + other.nbytes + 64, dtype=torch.uint8)
    args[i] = whole[: first.nbytes].view(first.dtype).view(first.shape).copy_(first)
    begin = other.itemsize if first.nbytes > other.itemsize else 0
    inside = whole[begin : begin + other.nbytes].view(other.dtype).view(other.shape)
    return inside


def attempts(name: str) -> Iterator[tuple[str, list[Any], bool]]:
    """Calls of an op with one wrong argument each."""
    declared = getattr(torch.ops.commhooks, name).default._schema.arguments
    written = [
        argument.alias_info is not None and argument.alias_info.is_write for argument in declared
    ]
    for i, argument in enumerate(declared):
        for words, value, refused in variants(
            name, str(argument.type), argument.name, CALLS[name]()[i]
        ):
            args = list(CALLS[name]())
            args[i] = value
            yield f"{argument.name} {words}", args, refused
        for j, other in enumerate(declared):
            args = list(CALLS[name]())
            tensors = isinstance(args[i], Tensor) and isinstance(args[j], Tensor)
            if i == j or not tensors or not written[j] or not args[i].nbytes or not args[j].nbytes:
                continue
            args[j] = overlapping(args, i, j)
            yield f"{other.name} in {argument.name}", args, True
    args = list(CALLS[name]())
    yield "too few", args[:-1], True
    yield "too many", [*args, 1], True


def run(call: Callable[..., None], args: list[Any]) -> bool:
    """Returns whether the arguments were accepted."""
    try:
        call(*args)
    except Exception:
        return False
    return True


def hostile() -> list[str]:
    """Makes all calls; those that were taken and must not be."""
    taken = []
    random.seed(0)
    torch.manual_seed(0)
    for name in CALLS:
        _op._OPS[name](*CALLS[name]())  # what looks like a right call is right: nothing else may be
        for words, args, refused in attempts(name):
            if run(_op._OPS[name], args) and refused:
                taken.append(f"{name}({words})")
        for words, args, refused in attempts(name):
            # PyTorch's dispatcher makes numbers of what it can before the op sees them.
            number = not any(word in words for word in (" in ", "meta", "memory", "strided"))
            if run(getattr(torch.ops.commhooks, name), args) and refused and not number:
                taken.append(f"torch.ops.commhooks.{name}({words})")
    return taken


if __name__ == "__main__":
    for line in hostile():
        print(line)
    print("done")
