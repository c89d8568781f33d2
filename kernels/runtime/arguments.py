"""Arguments of ops: their kinds, where they lie in memory, and how kernels take them."""

from __future__ import annotations

import ctypes
import operator
import reprlib
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

__all__ = [
    "Arguments",
    "as_ctypes",
    "as_flag",
    "as_tensor",
    "check",
    "check_whole",
    "is_flag",
    "whole",
]


def as_ctypes(value: Tensor | float | None) -> Any:
    """A pointer for a tensor or None, float for a float, int64 for an integer or a bool."""
    if value is None:
        return ctypes.c_void_p(None)
    if isinstance(value, Tensor):
        return ctypes.c_void_p(value.data_ptr())
    if isinstance(value, int):
        return ctypes.c_int64(value)
    if isinstance(value, float):
        return ctypes.c_float(value)
    raise TypeError(f"kernels take tensors, None, int, bool and float, got {_shown(value)}")


# One value ------------------------------------------------------------------------------------


def whole(caller: str, name: str, value: Any) -> int:
    """The whole number that ``value`` is, of Python or NumPy; TypeError if it is none."""
    if type(value) is int:
        return value
    if not is_flag(value):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise TypeError(f"{caller}({name}): a whole number, got {_shown(value)}")


def check_whole(caller: str, name: str, value: int, low: int, high: int) -> None:
    """Raises unless ``low <= value < high``."""
    if not low <= value < high:
        raise ValueError(f"{caller}({name}): {low} to {high - 1}, got {value}")


def is_flag(value: Any) -> bool:
    """Whether ``value`` is a bool, of Python, NumPy or PyTorch: no number for a setting."""
    return isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool")


def _real(caller: str, name: str, value: Any) -> float:
    if hasattr(value, "__float__") and not is_flag(value) and getattr(value, "size", 1) != 0:
        try:
            return float(value)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            pass
    raise TypeError(f"{caller}({name}): a number, got {_shown(value)}")


def as_flag(caller: str, name: str, value: Any) -> bool:
    """The bool that ``value`` is, of Python or NumPy."""
    if is_flag(value) and not isinstance(value, Tensor):
        return bool(value)
    raise TypeError(f"{caller}({name}): True or False, got {_shown(value)}")


def _text(caller: str, name: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    raise TypeError(f"{caller}({name}): a string, got {_shown(value)}")


def as_tensor(caller: str, name: str, value: Any) -> Tensor:
    """``value``, which is a tensor."""
    if isinstance(value, Tensor):
        return value
    raise TypeError(f"{caller}({name}): a tensor, got {_shown(value)}")


def _maybe_tensor(caller: str, name: str, value: Any) -> Tensor | None:
    if value is None or isinstance(value, Tensor):
        return value
    raise TypeError(f"{caller}({name}): a tensor or None, got {_shown(value)}")


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of {value.dtype}, shape {tuple(value.shape)}"
    return f"{reprlib.repr(value)} of type {type(value).__name__}"


# By the types of a schema; arguments of other types are passed on as they are.
_KINDS: dict[str, Callable[[str, str, Any], Any]] = {
    "Tensor": as_tensor,
    "Optional[Tensor]": _maybe_tensor,
    "int": whole,
    "float": _real,
    "bool": as_flag,
    "str": _text,
}
_PLAIN: dict[str, tuple[type, ...]] = {
    "Tensor": (Tensor, Parameter),
    "Optional[Tensor]": (Tensor, Parameter, type(None)),
    "int": (int,),
    "float": (float,),
    "bool": (bool,),
    "str": (str,),
}


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
    if not (tensor.is_cpu and like.is_cpu) and tensor.device != like.device:
        raise ValueError(
            f"{caller}({name}): all on one device, got {tensor.device} and {like.device}"
        )
    if not tensor.is_contiguous():
        got = f"strides {tensor.stride()}" if tensor.layout == torch.strided else tensor.layout
        raise ValueError(f"{caller}({name}): contiguous, got {got}")
    if n is not None and tensor.numel() != n:
        raise ValueError(f"{caller}({name}): {n} entries, got {tensor.numel()}")


# All of an op ---------------------------------------------------------------------------------


class Arguments:
    """The arguments that an op's schema declares.

    Args:
        caller: the function that users call, for messages.
        schema: ``_schema.arguments`` of the op.
        same: pairs of names: what is written to one may be the other, the very same entries.
    """

    def __init__(
        self, caller: str, schema: Sequence[Any], same: Iterable[tuple[str, str]] = ()
    ) -> None:
        self.caller = caller
        self.names = [one.name for one in schema]
        self._kinds = [str(one.type) for one in schema]
        self._plain: set[tuple[type, ...]] = set()
        written = [one.alias_info is not None and one.alias_info.is_write for one in schema]
        self._tensors = [i for i, kind in enumerate(self._kinds) if "Tensor" in kind]
        # Of pairs one of which is written to, whether they may be the same entries.
        self._pairs = {
            (i, j): {self.names[i], self.names[j]} in [set(pair) for pair in same]
            for i in self._tensors
            for j in self._tensors
            if i != j and (written[i] or written[j])
        }

    def are_plain(self, args: tuple[Any, ...]) -> bool:
        """Whether all are of the schema's own types, and tensors of no subclass."""
        types = tuple(map(type, args))
        if types in self._plain:
            return True
        plain = len(types) == len(self._kinds) and all(
            one in _PLAIN.get(kind, ()) for one, kind in zip(types, self._kinds, strict=True)
        )
        if plain:
            self._plain.add(types)
        return plain

    def converted(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The same, numbers as kernels take them; TypeError if one is of another kind."""
        if self.are_plain(args):
            return args
        if len(args) != len(self.names):
            raise TypeError(f"{self.caller}: {len(self.names)} arguments, got {len(args)}")
        return tuple(
            _KINDS[kind](self.caller, name, value) if kind in _KINDS else value
            for kind, name, value in zip(self._kinds, self.names, args, strict=True)
        )

    def check_memory(self, args: tuple[Any, ...]) -> None:
        """Raises unless kernels may read and write where the tensors lie."""
        spans = []
        for i in self._tensors:
            tensor = args[i]
            if tensor is None:
                continue
            size = tensor.nbytes
            if not size:
                continue
            begin = tensor.data_ptr()
            if begin % 8 or not begin or size > tensor.untyped_storage().nbytes():
                self._check_place(i, tensor)
            spans.append((begin, begin + size, i))
        spans.sort()
        before, stop, j, met = 0, 0, 0, False
        for begin, end, i in spans:
            if begin < stop:
                # Two that are the same are common; whatever is rarer takes its time.
                if met or (begin, end) != (before, stop) or self._pairs.get((i, j)) is False:
                    self._check_overlaps(spans, args)
                    return
                if args[i].dtype != args[j].dtype:
                    self._check_overlaps(spans, args)
                met = True
            else:
                met = False
            before, stop, j = begin, end, i

    def _check_place(self, i: int, tensor: Tensor) -> None:
        begin = tensor.data_ptr()
        if not begin or tensor.nbytes > tensor.untyped_storage().nbytes():
            raise ValueError(f"{self.caller}({self.names[i]}): the tensor has no memory")
        if begin % tensor.itemsize:
            raise ValueError(
                f"{self.caller}({self.names[i]}): begins at a multiple of "
                f"{tensor.itemsize} bytes, got address {begin:#x}"
            )

    def _check_overlaps(self, spans: list[tuple[int, int, int]], args: tuple[Any, ...]) -> None:
        for k, (begin, end, i) in enumerate(spans):
            for other, stop, j in spans[k + 1 :]:
                if other >= end:
                    break
                may_be_same = self._pairs.get((i, j))
                if may_be_same is None:  # both are only read
                    continue
                if may_be_same and (begin, end) == (other, stop) and args[i].dtype == args[j].dtype:
                    continue
                rule = "be the same or share no memory" if may_be_same else "share no memory"
                both = ", ".join(self.names[one] for one in sorted((i, j)))
                raise ValueError(f"{self.caller}({both}): have to {rule}")

    def check_all_or_none_meta(self, args: tuple[Any, ...]) -> None:
        """Raises if some tensors have data and others have none; tables lie on the CPU always."""
        plain = [one for one in args if type(one) in (Tensor, Parameter)]
        if any(one.is_meta for one in plain) and not all(
            one.is_meta for one in plain if one.dtype != torch.int64
        ):
            raise ValueError(f"{self.caller}: all tensors on one device, some are on 'meta'")

    def check_alike(self, args: tuple[Any, ...]) -> None:
        """Raises unless all tensors are contiguous and lie on the first one's device."""
        tensors = [(self.names[i], args[i]) for i in self._tensors if args[i] is not None]
        for name, tensor in tensors:
            check(self.caller, name, tensor, like=tensors[0][1], dtypes=(tensor.dtype,))
