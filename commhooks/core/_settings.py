"""Checks what users and files give: settings and options by their declared types, and texts."""

from __future__ import annotations

import functools
import inspect
import json
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
    "check_dataclass",
    "check_seed",
    "check_settings",
    "check_value",
    "checked",
    "declared",
    "from_json",
    "is_shape",
    "printable",
    "shown",
]

_ENDLESS = "infinity is no bound"
Bound: TypeAlias = Annotated[float, _ENDLESS]  # a limit; the only float that may be infinite

P = ParamSpec("P")
R = TypeVar("R")
_MAX_SHOWN = 80
_MAX_DIMENSIONS, _MAX_ENTRIES = 64, 2**48  # of a tensor; no memory has as many
_DEEPEST = 16  # lists and dicts within each other; those that this package writes have seven
_SEEDS = range(-(2**63), 2**63)


class _Unfit(Exception):
    """Raised inside this file for a value that is not of its declared type."""


def check_settings(owner: Any) -> None:
    """Checks the fields of a dataclass by their types, and makes NumPy's numbers Python's own.

    Raises:
        OptionError: names class, field, the rule and what came.
    """
    kind: Any = type(owner)
    for name, annotation in _fields_of(kind):
        value = getattr(owner, name)
        fit = check_value(kind.__name__, name, value, annotation)
        if fit is not value:
            # Frozen, but not used yet. Ranks and checkpoints compare schemes by their text, in
            # which np.int64(4) and 4 are not equal.
            object.__setattr__(owner, name, fit)


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Wraps ``function`` so that arguments are checked by their annotations before each call."""
    kinds = declared(function)

    @functools.wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> R:
        given = dict(zip(kinds, args, strict=False)) | options
        for name, value in given.items():
            if name in kinds:
                given[name] = check_value(function.__name__, name, value, kinds[name])
        by_name = {name: given[name] for name in options}
        by_position = [given[name] for name, _ in zip(kinds, args, strict=False)]
        surplus = args[len(by_position) :]  # handed on, so that Python's own TypeError names them
        return function(*by_position, *surplus, **by_name)  # type: ignore[arg-type]

    return call


def check_value(call: str, name: str, value: Any, annotation: Any) -> Any:
    """Checks an argument and returns it in its declared type: a NumPy integer as an int, and so on.

    Args:
        call: the function or class that takes the value, for the message.
        name: of the argument, for the message.
        value: to check.
        annotation: the declared type.

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
def check_dataclass(kind: Any) -> None:
    """Raises unless a scheme class is a frozen dataclass, whose settings are part of its repr.

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
    """Returns the seed of all random streams, a whole number of 64 bits with a sign.

    Raises:
        OptionError: the seed is something else, such as None, a float or a tensor.
    """
    fit: int = check_value("HookState", "seed", seed, int)
    if fit not in _SEEDS:
        raise OptionError(f"HookState(seed=...) is a whole number of 64 bits, got {shown(seed)}")
    return fit


def shown(value: Any) -> str:
    """Returns a value as text for a message, on one line; long text is cut."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # a class of the user's: the message at hand is worth more than its error
        text = f"a {type(value).__name__}"
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def printable(text: str) -> str:
    """Escapes characters of a text that a terminal would act on.

    Line ends stay; control characters, marks of direction and halves of characters do not.
    """
    return "".join(
        character
        if character.isprintable() or character == "\n"
        else character.encode("unicode_escape").decode()
        for character in text
    )


def from_json(text: str) -> Any:
    """Parses JSON from an untrusted file.

    Raises:
        ValueError: the text is no JSON, is nested deeply, or has a text that is none.
    """
    deep = ValueError(f"it is nested more than {_DEEPEST} deep")
    try:
        value = json.loads(text)
    except RecursionError:
        raise deep from None
    level: list[Any] = [value]
    for _ in range(_DEEPEST):
        inside: list[Any] = []
        for element in level:
            if isinstance(element, str):
                element.encode()  # half a character is a UnicodeEncodeError, which is a ValueError
            elif isinstance(element, dict):
                inside += [*element, *element.values()]
            elif isinstance(element, list):
                inside += element
        if not inside:
            return value
        level = inside
    raise deep


def is_shape(sizes: object) -> bool:
    """Whether a value from an untrusted file is a possible shape of a tensor."""
    return (
        isinstance(sizes, list | tuple)
        and len(sizes) <= _MAX_DIMENSIONS
        and all(type(size) is int and 0 <= size <= _MAX_ENTRIES for size in sizes)
        and math.prod(sizes) <= _MAX_ENTRIES
    )


# ---- what is declared


def declared(function: Callable[..., Any]) -> Mapping[str, Any]:
    """Returns the types of a function's named parameters; ``Any`` where none is declared."""
    module = getattr(function, "__module__", "")
    return {
        name: _resolved(parameter.annotation, module)
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    }


@functools.lru_cache(maxsize=1024)
def _fields_of(owner: type) -> tuple[tuple[str, Any], ...]:
    """Returns name and type of each setting of a dataclass."""
    kinds = {}
    for base in reversed(owner.__mro__):  # subclasses last: they may redeclare a type
        for name, annotation in inspect.get_annotations(base).items():
            kinds[name] = _resolved(annotation, base.__module__)
    settings = (setting.name for setting in fields(owner) if setting.init)
    return tuple((name, kinds.get(name, Any)) for name in settings)


def _resolved(annotation: Any, module: str) -> Any:
    """Returns the type that an annotation names; ``Any`` where that is not known."""
    if annotation is inspect.Parameter.empty:
        return Any
    if not isinstance(annotation, str):
        return annotation
    # One by one: typing.get_type_hints gives up all annotations where one cannot be resolved.
    try:
        return eval(annotation, dict(vars(sys.modules[module])) if module in sys.modules else {})
    except Exception:  # imported for type checkers only, or local to a function
        return Any


# ---- what fits


def _fit(value: Any, kind: Any) -> Any:
    """Returns ``value``, a NumPy number as Python's own; raises ``_Unfit``."""
    if kind is bool:
        return _flag(value)
    if kind is int:
        return _whole(value)
    if kind is float:
        return _number(value, endless=False)
    if kind is None:
        return _check_fits(value, value is None)
    if isinstance(kind, type) and get_origin(kind) is None and kind is not Any:
        return _check_fits(value, isinstance(value, kind))
    return _fit_generic(value, kind)


def _fit_generic(value: Any, kind: Any) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        if arguments == (float, _ENDLESS):
            return _number(value, endless=True)
        return _fit(value, arguments[0])
    if origin is Literal:
        # By type, too: True == 1, and 1.0 == 1.
        same = [choice for choice in arguments if type(choice) is type(value) and choice == value]
        return _check_fits(value, bool(same))
    if origin in (Union, types.UnionType):
        for argument in arguments:
            try:
                return _fit(value, argument)
            except _Unfit:
                continue
        raise _Unfit
    if isinstance(origin, type) and origin.__module__ == "os":  # os.PathLike[str]
        return _check_fits(value, isinstance(value, origin))
    return value  # containers: what is in them is for the class to check


def _check_fits(value: Any, holds: bool) -> Any:
    if not holds:
        raise _Unfit
    return value


def _flag(value: Any) -> bool:
    # NumPy's bool registers with no abstract class of ``numbers``: its name decides.
    kind = type(value)
    of_numpy = kind.__module__ == "numpy" and kind.__name__ in ("bool", "bool_")
    _check_fits(value, isinstance(value, bool) or of_numpy)
    return bool(value)


def _whole(value: Any) -> int:
    # bool is an Integral in Python; ``rank=True`` is a mistake.
    _check_fits(value, isinstance(value, numbers.Integral) and not isinstance(value, bool))
    return operator.index(value)


def _number(value: Any, *, endless: bool) -> float:
    _check_fits(value, isinstance(value, numbers.Real) and not isinstance(value, bool))
    try:
        number = float(value)
    except OverflowError:
        raise _Unfit from None
    _check_fits(value, math.isfinite(number) or (endless and not math.isnan(number)))
    return number


def _rule(kind: Any) -> str:
    """Returns what a type asks for, in words."""
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
