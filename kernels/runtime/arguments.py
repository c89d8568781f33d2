"""Declares, checks and converts the arguments of ops."""

from __future__ import annotations

import ctypes
import inspect
import operator
import reprlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache
from operator import le
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from .._torch import version_of

__all__ = [
    "FEEDBACK",
    "FLOATS",
    "Arguments",
    "Entries",
    "Form",
    "Rule",
    "as_ctypes",
    "as_flag",
    "as_tensor",
    "check",
    "check_whole",
    "is_flag",
    "like",
    "whole",
    "wide",
]

FLOATS = (torch.float32, torch.float16, torch.bfloat16)  # those that kernels know


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


def _words_of(allowed: range) -> str:
    if allowed.step > 1:
        return f"a multiple of {allowed.step}"
    if allowed.stop == 2**63:
        return f"{allowed.start} or more"
    return f"{allowed.start} to {allowed.stop - 1}"


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
        layout = f"strides {tensor.stride()}" if tensor.layout == torch.strided else tensor.layout
        raise ValueError(f"{caller}({name}): contiguous, got {layout}")
    if n is not None and tensor.numel() != n:
        raise ValueError(f"{caller}({name}): {n} entries, got {tensor.numel()}")


# Declarations of ops ---------------------------------------------------------------------------


class _DtypeOf(NamedTuple):
    """Represents the dtypes that depend on the dtype of the argument ``name``."""

    name: str
    is_wide: bool


class Entries(NamedTuple):
    """Declares what a tensor among the arguments of an op holds, where it is not None.

    It also has to be contiguous, and on the device of the op's first argument.

    Attributes:
        dtypes: the allowed dtypes, or ``like`` or ``wide`` of another argument.
        n: the number of entries, any if None. The name of a tensor stands for as many entries, and
            "table.numel" for an attribute of what is read from the argument ``table``. Otherwise a
            function of the arguments that its parameters name.
    """

    dtypes: torch.dtype | tuple[torch.dtype, ...] | _DtypeOf
    n: int | str | Callable[..., int] | None = None


# The values not sent before, and the values not sent now.
FEEDBACK = {
    "residual": Entries(torch.float32, n="x"),
    "unsent": Entries(torch.float32, n="x"),
}
# A tensor, the range of a whole number, or the function that reads a table: it is called with the
# table and the op's name for messages, and raises ValueError for a table that kernels cannot trust.
Rule = Entries | range | Callable[[Tensor, str], Any]


def like(name: str) -> _DtypeOf:
    """Declares the dtype of the argument ``name``."""
    return _DtypeOf(name, False)


def wide(name: str) -> _DtypeOf:
    """Declares the dtype in which the argument ``name`` is computed on: float32, or float64."""
    return _DtypeOf(name, True)


@cache
def _parameters_of(function: Callable[..., Any]) -> tuple[list[str], bool]:
    """Returns the names of parameters, and whether ``*rest`` comes after them."""
    parameters = inspect.signature(function).parameters.values()
    names = [
        parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_POSITIONAL
    ]
    return names, len(names) < len(parameters)


def _picking(places: list[int]) -> Pick:
    """Returns a function that picks arguments by their places."""
    if len(places) > 1:
        return operator.itemgetter(*places)
    begin = places[0] if places else 0
    return operator.itemgetter(slice(begin, begin + len(places)))


# All of an op ---------------------------------------------------------------------------------

Pick = Callable[[tuple[Any, ...]], tuple[Any, ...]]


class Form(NamedTuple):
    """Describes calls whose arguments have the same types.

    Attributes:
        tensors, tables, non_tensors: pick from the arguments of a call the tensors that are no
            tables, the tables, and what a check may look at that is no tensor.
        places: which of the tensors an argument is.
        right: what arguments looked like that were found right, and whether they are beyond the
            kernels; with their tables.
    """

    tensors: Pick
    tables: Pick
    non_tensors: Pick
    places: dict[int, int]
    right: dict[tuple[Any, ...], tuple[bool, tuple[Tensor, ...]]]


_MOST = 1024  # remembered calls of a form; there are a few per bucket


class Arguments:
    """Checks the arguments of one op against its schema, and against what the op declares.

    Args:
        caller: the public function, for messages.
        schema: ``_schema.arguments`` of the op.
        same: pairs of names of arguments that may be the same tensor although one is written to.
        takes: rules by the names of arguments. Numbers and tables are checked first, then tensors
            in their order.

    Attributes:
        declared: whether there are rules, or a check of the op's own.
        beyond: whether only the definition handles arguments that are right.
        forms: what is known of calls that need no conversion, by the types of their arguments.
            There are few per op: each optional tensor is given or not.
    """

    def __init__(
        self,
        caller: str,
        schema: Sequence[Any],
        same: Iterable[tuple[str, str]] = (),
        takes: Mapping[str, Rule] | None = None,
    ) -> None:
        self.caller = caller
        self.names = [argument.name for argument in schema]
        self.forms: dict[tuple[type, ...], Form] = {}
        self.declared = takes is not None
        self.beyond: Callable[..., bool] = lambda *args: False
        # Numbers and tables first, which numbers of entries depend on.
        rules = sorted(
            (takes or {}).items(), key=lambda name_and_rule: isinstance(name_and_rule[1], Entries)
        )
        self._takes = dict(rules)
        self._op_check: Callable[..., None] | None = None
        self._kinds = [str(argument.type) for argument in schema]
        aliases = [argument.alias_info for argument in schema]
        written = [alias is not None and alias.is_write for alias in aliases]
        self._tensors = [i for i, kind in enumerate(self._kinds) if "Tensor" in kind]
        pairs = [(self.names.index(first), self.names.index(second)) for first, second in same]
        # The last first, so that the places of the others stay as they are when it is left out.
        self._same = sorted(pairs, key=lambda pair: -pair[1])
        # For each pair of which at least one is written to: whether both may be the same tensor.
        self._pairs = {
            (i, j): (i, j) in self._same or (j, i) in self._same
            for i in self._tensors
            for j in self._tensors
            if i != j and (written[i] or written[j])
        }

    def add_check(self, function: Callable[..., None]) -> None:
        """Adds the op's own check of the arguments that its parameters name."""
        self._op_check = function
        self.declared = True
        self.forms.clear()  # what was right without it

    def form_of(self, args: tuple[Any, ...]) -> Form | None:
        """Returns the form of a call; None if some type is not exactly what the schema declares."""
        types = tuple(map(type, args))
        form = self.forms.get(types)
        if form is not None or len(types) != len(self._kinds):
            return form
        for actual, kind in zip(types, self._kinds, strict=True):
            if actual not in _PLAIN.get(kind, ()):
                return None
        form = self.forms[types] = self.new_form(args)
        return form

    def new_form(self, args: tuple[Any, ...]) -> Form:
        """Returns the form of a call, of any types."""
        checked_names = _parameters_of(self._op_check)[0] if self._op_check is not None else []
        tensors: list[int] = []
        tables: list[int] = []
        non_tensors: list[int] = []
        for i, (kind, name) in enumerate(zip(self._kinds, self.names, strict=True)):
            rule = self._takes.get(name)
            if args[i] is None:
                continue
            if "Tensor" not in kind:
                # Factors change, and hardly any check sees one.
                if kind != "float" or name in checked_names:
                    non_tensors.append(i)
                continue
            (tables if callable(rule) else tensors).append(i)
        places = {i: place for place, i in enumerate(tensors)}
        return Form(_picking(tensors), _picking(tables), _picking(non_tensors), places, {})

    def check(self, args: tuple[Any, ...], form: Form) -> tuple[bool, bool]:
        """Raises TypeError or ValueError unless the arguments are as the op declares them.

        What looks like arguments that were right is right: checks see dtypes, shapes, strides and
        devices of tensors, numbers, and tables, but no entries of other tensors. All that is read
        of a tensor is read in one loop here, which takes as long as half of a small kernel.

        Returns:
            Whether only the definition handles the arguments, and whether the memory is right as
            well: if not, ``check_memory`` finds out.
        """
        tensors = form.tensors(args)
        look: list[Any] = [form.non_tensors(args)]
        dropped = -1
        for i, j in self._same:
            # Feedback in place is common, and allowed; so is one step for two streams of bits.
            if args[i] is args[j] and args[i] is not None and j != dropped:
                look.append((i, j))
                place, dropped = form.places[j], j
                tensors = tensors[:place] + tensors[place + 1 :]
        # Tables: their identity, number of writes and memory.
        begins, ends, sound = [], [], True
        for table in form.tables(args):
            if table.layout is not torch.strided:
                self.check_rules(args)
                return self.beyond(*args), False
            try:
                look += id(table), version_of(table)  # an id stands for what the entry keeps
            except RuntimeError:  # an inference tensor has no counter
                look.append(id(table))
            begin, nbytes = table.data_ptr(), table.nbytes
            if begin % 8 or not begin or nbytes > table.untyped_storage().nbytes():
                sound = False
            begins.append(begin)
            ends.append(begin + nbytes)
        # Other tensors: their strides, dtype, shape, device and memory.
        for tensor in tensors:
            if not tensor.is_contiguous():
                if tensor.layout is not torch.strided:
                    self.check_rules(args)
                    return self.beyond(*args), False
                look.append(tensor.stride())
            look += tensor.dtype, tensor.shape, tensor.is_cpu or tensor.device
            begin, nbytes = tensor.data_ptr(), tensor.nbytes
            if not nbytes:
                continue  # nobody reads the null pointer of an empty one
            if (
                not begin
                or nbytes > tensor.untyped_storage().nbytes()
                or (begin % 8 and begin % tensor.itemsize)  # 8 does for every dtype of an op
            ):
                sound = False
            begins.append(begin)
            ends.append(begin + nbytes)
        # Arguments that look like earlier ones need no check.
        key = tuple(look)
        known = form.right.get(key)
        if known is None:
            self.check_rules(args)
            if len(form.right) >= _MOST:
                form.right.clear()
            known = form.right[key] = self.beyond(*args), form.tables(args)
        # Memory: whether each tensor begins behind the one before.
        begins.sort()
        ends.sort()
        return known[0], sound and all(map(le, ends, begins[1:]))

    def check_rules(self, args: tuple[Any, ...]) -> None:
        """Checks as ``check`` does, whether such arguments passed before or not."""
        given = dict(zip(self.names, args, strict=True))
        tables: dict[str, Any] = {}
        for name, rule in self._takes.items():
            value = given[name]
            if value is None:
                tables[name] = None
            elif isinstance(rule, Entries):
                n = self._number(rule.n, given, tables)
                dtypes = self._dtypes(rule.dtypes, given)
                check(self.caller, name, value, like=args[0], dtypes=dtypes, n=n)
            elif isinstance(rule, range):
                if value not in rule:
                    raise ValueError(f"{self.caller}({name}): {_words_of(rule)}, got {value}")
            else:
                tables[name] = rule(value, self.caller)
        if self._op_check is not None:
            self._call(self._op_check, given)

    def _dtypes(
        self, dtypes: torch.dtype | tuple[torch.dtype, ...] | _DtypeOf, given: dict[str, Any]
    ) -> tuple[torch.dtype, ...]:
        if isinstance(dtypes, _DtypeOf):
            dtype = given[dtypes.name].dtype
            return (torch.float32 if dtypes.is_wide and dtype != torch.float64 else dtype,)
        return (dtypes,) if isinstance(dtypes, torch.dtype) else dtypes

    def _number(
        self,
        n: int | str | Callable[..., int] | None,
        given: dict[str, Any],
        tables: dict[str, Any],
    ) -> int | None:
        if n is None or isinstance(n, int):
            return n
        if isinstance(n, str):
            name, _, attribute = n.partition(".")
            count: int | None = (
                getattr(tables[name], attribute, None) if attribute else given[name].numel()
            )
            return count
        number: int = self._call(n, given)
        return number

    def _call(self, function: Callable[..., Any], given: dict[str, Any]) -> Any:
        """Calls a function of the arguments that its parameters name."""
        names, more = _parameters_of(function)
        values = [self.caller if name == "caller" else given[name] for name in names]
        if more:
            values += list(given.values())[self.names.index(names[-1]) + 1 :]
        return function(*values)

    def converted(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Converts numbers to Python's types; raises TypeError for an argument of another kind."""
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
            # Nobody reads the null pointer of an empty one.
            if tensor is not None and tensor.nbytes:
                self._check_place(i, tensor)
                begin = tensor.data_ptr()
                spans.append((begin, begin + tensor.nbytes, i))
        self._check_overlaps(sorted(spans), args)

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
            for start, stop, j in spans[k + 1 :]:
                if start >= end:  # as do all later ones, which begin no earlier
                    break
                may_be_same = self._pairs.get((i, j))
                if may_be_same is None:  # both are read only
                    continue
                if may_be_same and (begin, end) == (start, stop) and args[i].dtype == args[j].dtype:
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
