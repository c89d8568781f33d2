"""Settings and options are checked in one place: against the types that they are declared with."""

from __future__ import annotations

import functools
import inspect
import math
import numbers
import operator
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import (
    Annotated,
    Any,
    Literal,
    ParamSpec,
    TypeAlias,
    TypeVar,
    Union,
    get_args,
    get_origin,
)

import torch

from commhooks.errors import OptionError

__all__ = [
    "Bound",
    "check_seed",
    "check_settings",
    "checked",
    "declared",
    "fitting",
    "need_dataclass",
    "shown",
]

_ENDLESS = "infinity is no bound"
Bound: TypeAlias = Annotated[float, _ENDLESS]  # a limit, which may be infinite

P = ParamSpec("P")
R = TypeVar("R")
_MOST_SHOWN = 80
_SEEDS = range(-(2**63), 2**63)


class _Unfit(Exception):
    """A value is not of its declared type."""


def check_settings(owner: Any) -> None:
    """Checks the fields of a dataclass by their types; numbers of numpy become Python's own.

    Raises:
        OptionError: names class, field, the rule and what came.
    """
    kind: Any = type(owner)
    for name, annotation in _fields_of(kind):
        value = getattr(owner, name)
        fit = fitting(kind.__name__, name, value, annotation)
        if fit is not value:
            object.__setattr__(owner, name, fit)


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """``function``, whose arguments are checked by their annotations before each call."""
    kinds = declared(function)

    @functools.wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> R:
        given = dict(zip(kinds, args, strict=False)) | options
        for name, value in given.items():
            if name in kinds:
                given[name] = fitting(function.__name__, name, value, kinds[name])
        rest = {name: given[name] for name in options}
        first = [given[name] for name, _ in zip(kinds, args, strict=False)]
        return function(*first, *args[len(first) :], **rest)  # type: ignore[arg-type]

    return call


def fitting(call: str, name: str, value: Any, annotation: Any) -> Any:
    """``value``, as its annotation says: a whole number of numpy as an int, and so on.

    Args:
        call: what the value is an argument of, for the message.

    Raises:
        OptionError: the value is of another type, or a number that is not finite.
    """
    try:
        return _fit(value, annotation)
    except _Unfit:
        hint = ""
        if isinstance(value, str) and "Scheme" in _rule(annotation):
            hint = ": use commhooks.make(name, ...) for a name"
        raise OptionError(
            f"{call}({name}=...) is {_rule(annotation)}, got {shown(value)}{hint}"
        ) from None


@functools.lru_cache(maxsize=1024)
def need_dataclass(kind: Any) -> None:
    """Raises unless the settings of a scheme class are known, fixed, and part of its text.

    Ranks and checkpoints compare schemes by that text.

    Raises:
        TypeError: the class is no frozen dataclass.
    """
    advice = "put @dataclass(frozen=True) above the class, below @register_scheme"
    name = kind.__name__
    if not hasattr(kind, "__dataclass_fields__"):
        raise TypeError(f"{name} is a scheme and has to be a dataclass: {advice}")
    if vars(kind).get("__hash__", True) is None:
        raise TypeError(f"{name} is a scheme whose settings can be changed: {advice}")
    if "__dataclass_fields__" in vars(kind):
        return
    settings = [
        setting
        for setting, annotation in inspect.get_annotations(kind).items()
        if "ClassVar" not in str(annotation)
        and not any(hasattr(base, setting) for base in kind.__mro__[1:])
    ]
    if settings:
        raise TypeError(
            f"{name} declares {', '.join(settings)} and is no dataclass itself, so these are no "
            f"settings: {advice}"
        )


def check_seed(seed: Any) -> int:
    """The base of all random streams, as a whole number of 64 bits.

    Raises:
        OptionError: anything else, such as None, a float or a tensor.
    """
    fit: int = fitting("HookState", "seed", seed, int)
    if fit not in _SEEDS:
        raise OptionError(f"HookState(seed=...) is a whole number of 64 bits, got {shown(seed)}")
    return fit


def shown(value: Any) -> str:
    """What came, for a message; long values are cut."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # of somebody else's class
        text = f"a {type(value).__name__}"
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


# ---- what is declared


def declared(function: Callable[..., Any]) -> Mapping[str, Any]:
    """The annotations of a function's named parameters, resolved; ``Any`` where there is none."""
    module = getattr(function, "__module__", "")
    return {
        name: _resolved(parameter.annotation, module)
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    }


@functools.lru_cache(maxsize=1024)
def _fields_of(owner: type) -> tuple[tuple[str, Any], ...]:
    """Name and type of each setting of a dataclass."""
    found = {}
    for one in reversed(owner.__mro__):  # a subclass may say more
        for name, annotation in inspect.get_annotations(one).items():
            found[name] = _resolved(annotation, one.__module__)
    return tuple((one.name, found.get(one.name, Any)) for one in fields(owner) if one.init)


def _resolved(annotation: Any, module: str) -> Any:
    """The type that an annotation stands for; ``Any`` where that cannot be found out."""
    if annotation is inspect.Parameter.empty:
        return Any
    if not isinstance(annotation, str):
        return annotation
    try:
        return eval(annotation, dict(vars(sys.modules[module])) if module in sys.modules else {})
    except Exception:  # imported for type checkers only, or local to a function
        return Any


# ---- what fits


def _fit(value: Any, kind: Any) -> Any:
    """``value``, or the Python number that it stands for; raises ``_Unfit``."""
    if kind is bool:
        return _flag(value)
    if kind is int:
        return _whole(value)
    if kind is float:
        return _number(value, endless=False)
    if kind is None:
        return _need(value, value is None)
    if isinstance(kind, type) and get_origin(kind) is None and kind is not Any:
        return _need(value, isinstance(value, kind))
    return _fit_generic(value, kind)


def _fit_generic(value: Any, kind: Any) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        if arguments == (float, _ENDLESS):
            return _number(value, endless=True)
        return _fit(value, arguments[0])
    if origin is Literal:
        same = [one for one in arguments if type(one) is type(value) and one == value]
        return _need(value, bool(same))
    if origin in (Union, types.UnionType):
        for one in arguments:
            try:
                return _fit(value, one)
            except _Unfit:
                continue
        raise _Unfit
    if isinstance(origin, type) and origin.__module__ == "os":  # os.PathLike[str]
        return _need(value, isinstance(value, origin))
    return value  # containers: what is in them is for the class to check


def _need(value: Any, holds: bool) -> Any:
    if not holds:
        raise _Unfit
    return value


def _flag(value: Any) -> bool:
    kind = type(value)  # numpy's registers with no abstract class
    of_numpy = kind.__module__ == "numpy" and kind.__name__ in ("bool", "bool_")
    _need(value, isinstance(value, bool) or of_numpy)
    return bool(value)


def _whole(value: Any) -> int:
    _need(value, isinstance(value, numbers.Integral) and not isinstance(value, bool))
    return operator.index(value)


def _number(value: Any, *, endless: bool) -> float:
    _need(value, isinstance(value, numbers.Real) and not isinstance(value, bool))
    try:
        number = float(value)
    except OverflowError:
        raise _Unfit from None
    _need(value, math.isfinite(number) or (endless and not math.isnan(number)))
    return number


def _rule(kind: Any) -> str:
    """What a type asks for, in words."""
    plain = {
        bool: "True or False",
        int: "a whole number",
        float: "a finite number",
        str: "a string",
        type(None): "None",
        torch.dtype: "a torch.dtype",
    }
    if isinstance(kind, type) and get_origin(kind) is None:
        return plain.get(kind, f"a {kind.__name__}")
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return "a number" if arguments == (float, _ENDLESS) else _rule(arguments[0])
    if origin is Literal:
        return " or ".join(map(repr, arguments))
    if origin in (Union, types.UnionType):
        return " or ".join(map(_rule, arguments))
    return f"a {getattr(origin, '__name__', kind)}"
