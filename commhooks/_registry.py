"""Schemes by name, and options spread over a scheme and the usual wrappers around it."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from typing import Any, TypeVar

import torch

from commhooks._errors import OptionError, UnknownSchemeError
from commhooks._scheme import Scheme

__all__ = ["describe", "make", "names", "register_scheme"]

Factory = Callable[..., Scheme]
F = TypeVar("F", bound=Factory)

_factories: dict[str, Factory] = {}
_dtypes: Mapping[str, torch.dtype] = {
    "fp16": torch.float16,
    "float16": torch.float16,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
}
# Options of every scheme, each a wrapper around it; see make.
_wrapper_options = ("start_step", "error_feedback", "wire_dtype", "coalesce")


def register_scheme(*scheme_names: str) -> Callable[[F], F]:
    """Makes a scheme class (or a function that returns a scheme) available by name.

    Raises:
        ValueError: a name is taken.

    Example:
        >>> @register_scheme("doctest_dense")
        ... @dataclass(frozen=True)
        ... class Mine(AllReduceDense):
        ...     pass
        >>> make("doctest_dense")
        Mine()
    """

    def decorate(factory: F) -> F:
        for name in scheme_names:
            if name in _factories:
                raise ValueError(
                    f"register_scheme({name!r}): the name is taken by {_factories[name]}"
                )
            _factories[name] = factory
        return factory

    return decorate


def names() -> list[str]:
    """The names of all registered schemes, sorted."""
    return sorted(_factories)


def make(scheme: str | Scheme, **options: Any) -> Scheme:
    """A scheme by name, with its options and those of the usual wrappers.

    Args:
        scheme: a registered name, or a scheme, which is returned wrapped as the options say.
        options: fields of the scheme's class, and for every scheme
            ``error_feedback`` (default: True for biased schemes),
            ``start_step`` (dense before that step),
            ``wire_dtype`` ("fp16", "bf16": floating payloads travel in that type),
            ``coalesce`` (all buckets of a step in one exchange).

    Raises:
        UnknownSchemeError: no such name; suggests the nearest.
        OptionError: no such option; lists those there are.

    Example:
        >>> make("powersgd", rank=2, start_step=100)
        DelayedStart(scheme=ErrorFeedback(scheme=PowerSGD(rank=2, ...)), start_step=100, ...)
    """
    from commhooks import _cast, _wrappers

    if "start_iter" in options or "start_powerSGD_iter" in options:
        raise OptionError("make: the option is called start_step here")
    wrapping = {key: options.pop(key) for key in _wrapper_options if key in options}
    if isinstance(scheme, str):
        built = _build(scheme, options)
    elif isinstance(scheme, Scheme):
        if options:
            raise OptionError(
                f"make({type(scheme).__name__}(...), {', '.join(options)}=...): settings of a "
                f"scheme that is already built are given to its class"
            )
        built = scheme
    else:
        raise TypeError(
            f"a scheme is given by name or as a Scheme, got {type(scheme).__name__}: "
            f"commhooks.names() lists the names"
        )
    if "wire_dtype" in wrapping:
        built = _cast.Cast(built, as_dtype(wrapping["wire_dtype"]))
    if wrapping.get("error_feedback", isinstance(scheme, str) and built.biased):
        built = _wrappers.ErrorFeedback(built)
    if wrapping.get("start_step"):
        built = _wrappers.DelayedStart(built, wrapping["start_step"])
    if wrapping.get("coalesce"):
        built = _wrappers.Coalesced(built)
    return built


def as_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """A torch dtype from "fp16", "bf16" or the dtype itself."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in _dtypes:
        raise ValueError(f"wire_dtype is one of {sorted(_dtypes)} or a torch.dtype, got {dtype!r}")
    return _dtypes[dtype]


def describe(scheme: Scheme) -> str:
    """The scheme with all its settings, as text; equal text means equal behaviour."""
    return repr(scheme)


def _build(name: str, options: dict[str, Any]) -> Scheme:
    factory = _factories.get(name)
    if factory is None:
        near = difflib.get_close_matches(name.lower(), _factories, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UnknownSchemeError(f"no scheme {name!r}{hint} Registered: {', '.join(names())}")
    if isinstance(factory, type):
        known = [setting.name for setting in fields(factory) if setting.init]
        for option in options:
            if option not in known:
                every = [*known, *_wrapper_options]
                near = difflib.get_close_matches(option, every, n=1, cutoff=0.5)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise OptionError(
                    f"scheme {name!r} has no option {option!r}{hint} Options: {', '.join(every)}"
                )
        missing = [
            setting.name
            for setting in fields(factory)
            if setting.init
            and setting.default is MISSING
            and setting.default_factory is MISSING
            and setting.name not in options
        ]
        if missing:
            raise OptionError(f"scheme {name!r} needs the options {', '.join(missing)}")
    try:
        return factory(**options)
    except TypeError as error:
        raise OptionError(f"scheme {name!r} does not take {options}: {error}") from error
