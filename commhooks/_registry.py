"""Schemes by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from typing import Any, TypeVar

from commhooks._errors import OptionError, UnknownSchemeError
from commhooks._scheme import Scheme

__all__ = ["build", "names", "register_scheme"]

Factory = Callable[..., Scheme]
F = TypeVar("F", bound=Factory)

_factories: dict[str, Factory] = {}


def register_scheme(*scheme_names: str) -> Callable[[F], F]:
    """Makes a scheme class (or a function that returns a scheme) available by name.

    Raises:
        ValueError: a name is taken.

    Example:
        >>> @register_scheme("first_bit")
        ... @dataclass(frozen=True)
        ... class FirstBit(Codec): ...
        >>> "first_bit" in names()
        True
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


def build(name: str, options: dict[str, Any], *, wrapper_options: Sequence[str] = ()) -> Scheme:
    """The scheme of that name with ``options``; messages list ``wrapper_options`` too.

    Raises:
        UnknownSchemeError, OptionError: no such name or option; suggests the nearest.
    """
    factory = _factories.get(name)
    if factory is None:
        near = difflib.get_close_matches(name.lower(), _factories, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UnknownSchemeError(f"no scheme {name!r}{hint} Registered: {', '.join(names())}")
    if isinstance(factory, type):
        known = [setting.name for setting in fields(factory) if setting.init]
        for option in options:
            if option not in known:
                every = [*known, *wrapper_options]
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
