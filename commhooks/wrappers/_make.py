"""Makes schemes by name, with the usual wrappers around them, and describes schemes in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

import torch

from commhooks.core._registry import build, scheme_names
from commhooks.core._scheme import Scheme, check_declarations, walk
from commhooks.core._settings import check_dataclass, check_value
from commhooks.errors import OptionError
from commhooks.wrappers._base import Coalesced
from commhooks.wrappers._cast import Cast
from commhooks.wrappers._feedback import ErrorFeedback, Scaled
from commhooks.wrappers._schedules import DelayedStart

__all__ = ["describe", "make", "short_repr"]

_DTYPES: Mapping[str, torch.dtype] = {
    "fp16": torch.float16,
    "float16": torch.float16,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
}
# Options of every scheme and their types; each is a wrapper around it.
WRAPPER_OPTIONS: Mapping[str, Any] = {
    "start_step": int,
    "error_feedback": bool,
    "wire_dtype": str | torch.dtype,
    "coalesce": bool,
}


def make(scheme: str | Scheme, **options: Any) -> Scheme:
    """Builds a scheme by name, with its options and those of the usual wrappers.

    Args:
        scheme: a registered name, or a scheme, which is wrapped according to the options.
        options: fields of the scheme's class, and for every scheme
            ``error_feedback`` (default: True for a biased scheme that is given by name, False for
            an object; with it, an unbiased scheme of large variance is also wrapped in ``Scaled``),
            ``start_step`` (gradients are averaged uncompressed before that step),
            ``wire_dtype`` ("fp16", "bf16": floating-point payloads are sent in that dtype),
            ``coalesce`` (all buckets of a step are sent in one exchange).

    Raises:
        UnknownSchemeError: no scheme has that name; the message suggests the nearest.
        OptionError: the scheme has no such option, or does not take its value.

    Example:
        >>> make("powersgd", rank=2, start_step=100)
        DelayedStart(scheme=ErrorFeedback(scheme=PowerSGD(rank=2, ...)), start_step=100, ...)
    """
    name = scheme if isinstance(scheme, str) else type(scheme).__name__
    wrapper_options = {
        key: check_value(name, key, options.pop(key), kind)
        for key, kind in WRAPPER_OPTIONS.items()
        if key in options
    }
    if isinstance(scheme, str):
        built = build(scheme, options, wrapper_options=tuple(WRAPPER_OPTIONS))
    elif isinstance(scheme, Scheme):
        if options:
            raise OptionError(
                f"make({type(scheme).__name__}(...), {', '.join(options)}=...): pass the settings "
                f"of a scheme that is given as an object to its class"
            )
        built = scheme
    else:
        raise TypeError(
            f"a scheme is given by name or as a Scheme, got {_kind_of(scheme)}: "
            f"commhooks.scheme_names() lists the names"
        )
    for nested in walk(built):
        kind: Any = type(nested)
        check_dataclass(kind)
        check_declarations(nested)
    # From the innermost wrapper to the outermost. The cast is inside error feedback, whose residual
    # then has its rounding errors, too; error feedback is inside the delayed start, whose dense
    # gradients need none.
    if "wire_dtype" in wrapper_options:
        built = Cast(built, as_dtype(wrapper_options["wire_dtype"]))
    traits = built.traits
    needs_feedback = isinstance(scheme, str) and traits.biased and traits.returns != "update"
    if wrapper_options.get("error_feedback", needs_feedback):
        built = ErrorFeedback(Scaled(built) if traits.error.variance > 1 else built)
    if wrapper_options.get("start_step"):
        built = DelayedStart(built, wrapper_options["start_step"])
    if wrapper_options.get("coalesce"):
        built = Coalesced(built)
    return built


def as_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """Returns the torch dtype for a name such as "fp16" or "bf16", or the dtype itself."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in _DTYPES:
        raise ValueError(f"wire_dtype is one of {sorted(_DTYPES)} or a torch.dtype, got {dtype!r}")
    return _DTYPES[dtype]


def _kind_of(scheme: object) -> str:
    if isinstance(scheme, type) and issubclass(scheme, Scheme):
        return f"the class {scheme.__name__}, not {scheme.__name__}(...)"
    return type(scheme).__name__


def describe(scheme: Scheme) -> str:
    """Returns a scheme with all its settings as text; equal text means equal behaviour."""
    return repr(scheme)


def short_repr(scheme: Scheme) -> str:
    """Returns a registered name, or the class with the settings that are not the default.

    ``describe`` has all settings.

    Example:
        >>> short_repr(make("int8"))
        'int8'
        >>> short_repr(make("powersgd", rank=4, start_step=100))
        'DelayedStart(ErrorFeedback(PowerSGD(rank=4)), start_step=100)'
    """
    # "none" first: of two names for one scheme, the documentation uses this one.
    for name in ("none", *scheme_names()):
        try:
            if make(name) == scheme:
                return name
        # A user's scheme may need an option, or raise anything: printing must not fail.
        except Exception:
            continue
    return _repr_of(scheme)


def _repr_of(value: object) -> str:
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
            parts.append(short_repr(setting))
        elif setting != default:
            parts.append(f"{field.name}={_repr_of(setting)}")
    return f"{type(value).__name__}({', '.join(parts)})"
