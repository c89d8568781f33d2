"""Describes a scheme in a few words, for people."""

from __future__ import annotations

from dataclasses import MISSING, fields, is_dataclass

from commhooks.core.registry import scheme_names
from commhooks.core.scheme import Scheme
from commhooks.wrappers.make import make

__all__ = ["brief"]


def brief(scheme: Scheme) -> str:
    """Returns a registered name, or the class with the settings that are not the default.

    ``describe`` has all settings.

    Example:
        >>> brief(make("int8"))
        'int8'
        >>> brief(make("powersgd", rank=4, start_step=100))
        'DelayedStart(ErrorFeedback(PowerSGD(rank=4)), start_step=100)'
    """
    # Of two names for one scheme, that of ``switch("none")`` and of all pages.
    for name in ("none", *scheme_names()):
        try:
            if make(name) == scheme:
                return name
        # A user's scheme may need an option, or raise anything: printing must not fail.
        except Exception:
            continue
    return _shown(scheme)


def _shown(value: object) -> str:
    if not isinstance(value, Scheme) or not is_dataclass(value):
        text = repr(value)
        return text if len(text) <= 40 else f"{type(value).__name__}(...)"
    parts = []
    for field in fields(value):
        setting = getattr(value, field.name)
        default: object = field.default
        if field.default_factory is not MISSING:
            default = field.default_factory()
        if isinstance(setting, Scheme) and default is MISSING:
            parts.append(brief(setting))
        elif setting != default:
            parts.append(f"{field.name}={_shown(setting)}")
    return f"{type(value).__name__}({', '.join(parts)})"
