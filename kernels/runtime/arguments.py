"""Checks and converts the arguments of ops."""

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
    """Converts a tensor or None to a pointer, a float to a float, an int or bool to an int64."""
    if value is None:
        return ctypes.c_void_p(None)
    if isinstance(value, Tensor):
        return ctypes.c_void_p(value.data_ptr())
    if isinstance(value, int):
        return ctypes.c_int64(value)  # bool is a subclass of int
    if isinstance(value, float):
        return ctypes.c_float(value)
    raise TypeError(f"kernels take tensors, None, int, bool and float, got {_shown(value)}")


# One value ------------------------------------------------------------------------------------


def whole(caller: str, name: str, value: Any) -> int:
    """Returns ``value`` as an ``int``; raises TypeError unless it is a Python or NumPy integer."""
    if type(value) is int:  # the common case, without a call
        return value
    # bool implements __index__, and True would pass as 1: a flag in place of a number is a mistake.
    if not is_flag(value):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise TypeError(f"{caller}({name}): a whole number, got {_shown(value)}")


def check_whole(caller: str, name: str, value: int, low: int, high: int) -> None:
    """Raises ValueError unless ``low <= value < high``."""
    if not low <= value < high:
        raise ValueError(f"{caller}({name}): {low} to {high - 1}, got {value}")


def is_flag(value: Any) -> bool:
    """Returns whether ``value`` is a bool of Python, NumPy or PyTorch."""
    # By the name of the dtype, so that NumPy need not be imported.
    return isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool")


def _real(caller: str, name: str, value: Any) -> float:
    # Strings have no __float__, though float() would parse them.
    if hasattr(value, "__float__") and not is_flag(value) and getattr(value, "size", 1) != 0:
        try:
            return float(value)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            pass
    raise TypeError(f"{caller}({name}): a number, got {_shown(value)}")


def as_flag(caller: str, name: str, value: Any) -> bool:
    """Returns ``value`` as a ``bool``; raises TypeError unless it is a Python or NumPy bool."""
    if is_flag(value) and not isinstance(value, Tensor):
        return bool(value)
    raise TypeError(f"{caller}({name}): True or False, got {_shown(value)}")


def _text(caller: str, name: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    raise TypeError(f"{caller}({name}): a string, got {_shown(value)}")


def as_tensor(caller: str, name: str, value: Any) -> Tensor:
    """Returns ``value``; raises TypeError unless it is a tensor."""
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


# Checks by the type that a schema declares. Arguments of other types are passed on unchanged.
_KINDS: dict[str, Callable[[str, str, Any], Any]] = {
    "Tensor": as_tensor,
    "Optional[Tensor]": _maybe_tensor,
    "int": whole,
    "float": _real,
    "bool": as_flag,
    "str": _text,
}
# Exact types that need no conversion. Other subclasses of Tensor are not among them: kernels
# would bypass a dispatch that the subclass defines.
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
    """Raises TypeError or ValueError unless ``tensor`` can be an argument of an op.

    Args:
        caller, name: the function and its argument, for the message.
        like: a tensor on the required device.
        dtypes: the allowed dtypes.
        n: the required number of entries; any number if None.
    """
    if tensor.dtype not in dtypes:
        allowed = ", ".join(str(dtype) for dtype in dtypes)
        raise TypeError(f"{caller}({name}): dtype is one of {allowed}, got {tensor.dtype}")
    # `is_cpu` is a flag, while `device` builds an object.
    if not (tensor.is_cpu and like.is_cpu) and tensor.device != like.device:
        raise ValueError(
            f"{caller}({name}): all on one device, got {tensor.device} and {like.device}"
        )
    if not tensor.is_contiguous():
        # A sparse tensor has no strides; asking for them would raise torch's own error instead.
        got = f"strides {tensor.stride()}" if tensor.layout == torch.strided else tensor.layout
        raise ValueError(f"{caller}({name}): contiguous, got {got}")
    if n is not None and tensor.numel() != n:
        raise ValueError(f"{caller}({name}): {n} entries, got {tensor.numel()}")


# All of an op ---------------------------------------------------------------------------------


class Arguments:
    """Checks the arguments of one op against its schema.

    Args:
        caller: the public function, for messages.
        schema: ``_schema.arguments`` of the op.
        same: pairs of names of arguments that may be the same tensor although one is written to.
    """

    def __init__(
        self, caller: str, schema: Sequence[Any], same: Iterable[tuple[str, str]] = ()
    ) -> None:
        self.caller = caller
        self.names = [argument.name for argument in schema]
        self._kinds = [str(argument.type) for argument in schema]
        # Combinations of types that were found plain. There are few per op (each optional tensor
        # given or not), and a lookup is one hash instead of a loop over the arguments.
        self._plain: set[tuple[type, ...]] = set()
        aliases = [argument.alias_info for argument in schema]
        written = [alias is not None and alias.is_write for alias in aliases]
        self._tensors = [i for i, kind in enumerate(self._kinds) if "Tensor" in kind]
        # For each pair of which at least one is written to: whether both may be the same tensor.
        self._pairs = {
            (i, j): {self.names[i], self.names[j]} in [set(pair) for pair in same]
            for i in self._tensors
            for j in self._tensors
            if i != j and (written[i] or written[j])
        }

    def are_plain(self, args: tuple[Any, ...]) -> bool:
        """Returns whether all arguments have exactly the types that the schema declares."""
        types = tuple(map(type, args))
        if types in self._plain:
            return True
        plain = len(types) == len(self._kinds) and all(
            actual in _PLAIN.get(kind, ()) for actual, kind in zip(types, self._kinds, strict=True)
        )
        if plain:
            self._plain.add(types)
        return plain

    def converted(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Converts numbers to Python's types; raises TypeError for an argument of another kind."""
        if self.are_plain(args):
            return args
        if len(args) != len(self.names):
            raise TypeError(f"{self.caller}: {len(self.names)} arguments, got {len(args)}")
        return tuple(
            _KINDS[kind](self.caller, name, value) if kind in _KINDS else value
            for kind, name, value in zip(self._kinds, self.names, args, strict=True)
        )

    def check_memory(self, args: tuple[Any, ...]) -> None:
        """Raises ValueError unless kernels may read and write the memory of the tensors.

        Kernels load whole vectors or spans before they store, so results in memory that overlaps
        would depend on the processor.
        """
        spans = []
        for i in self._tensors:
            tensor = args[i]
            if tensor is None:
                continue
            size = tensor.nbytes
            if not size:  # an empty tensor has a null pointer, which nobody reads
                continue
            begin = tensor.data_ptr()
            # One test for the three faults. A multiple of 8 is aligned for every dtype of an op.
            if begin % 8 or not begin or size > tensor.untyped_storage().nbytes():
                self._check_place(i, tensor)
            spans.append((begin, begin + size, i))
        # Sorted by their beginning, tensors that overlap nothing need one comparison each.
        spans.sort()
        previous, stop, j, met = 0, 0, 0, False  # met: whether the previous two spans were equal
        for begin, end, i in spans:
            if begin < stop:
                # A residual updated in place gives two equal spans, which is common and allowed.
                # Every other overlap is left to the comparison of all pairs.
                if met or (begin, end) != (previous, stop) or self._pairs.get((i, j)) is False:
                    self._check_overlaps(spans, args)
                    return
                if args[i].dtype != args[j].dtype:
                    self._check_overlaps(spans, args)
                met = True
            else:
                met = False
            previous, stop, j = begin, end, i

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
                if other >= end:  # as do all later ones, which begin no earlier
                    break
                may_be_same = self._pairs.get((i, j))
                if may_be_same is None:  # both are read only
                    continue
                if may_be_same and (begin, end) == (other, stop) and args[i].dtype == args[j].dtype:
                    continue
                rule = "be the same or share no memory" if may_be_same else "share no memory"
                both = ", ".join(self.names[index] for index in sorted((i, j)))
                raise ValueError(f"{self.caller}({both}): have to {rule}")

    def check_all_or_none_meta(self, args: tuple[Any, ...]) -> None:
        """Raises ValueError if some tensors have data and others have none.

        int64 tensors are exempt: the tables of matrices lie on the CPU in every case.
        """
        # A compiler's fake tensors are of a subclass, and name the device that they stand for.
        plain = [value for value in args if type(value) in (Tensor, Parameter)]
        if any(tensor.is_meta for tensor in plain) and not all(
            tensor.is_meta for tensor in plain if tensor.dtype != torch.int64
        ):
            raise ValueError(f"{self.caller}: all tensors on one device, some are on 'meta'")

    def check_alike(self, args: tuple[Any, ...]) -> None:
        """Raises ValueError unless all tensors are contiguous and on the device of the first."""
        tensors = [(self.names[i], args[i]) for i in self._tensors if args[i] is not None]
        for name, tensor in tensors:
            check(self.caller, name, tensor, like=tensors[0][1], dtypes=(tensor.dtype,))
