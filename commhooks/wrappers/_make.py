"""Makes schemes by name, with the usual wrappers around them, and describes schemes in words."""

from __future__ import annotations

import ast
import numbers
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, NamedTuple

import torch

from commhooks.core._registry import build, factory_of, options_of, scheme_names
from commhooks.core._scheme import Scheme, check_declarations, children, walk
from commhooks.core._settings import check_dataclass, check_value, shown
from commhooks.core._user_line import user_stacklevel
from commhooks.errors import OptionError
from commhooks.wrappers._base import Coalesced
from commhooks.wrappers._cast import Cast
from commhooks.wrappers._feedback import ErrorFeedback, Scaled
from commhooks.wrappers._schedules import DelayedStart

__all__ = ["as_typed", "describe", "make", "make_for_training", "short_repr"]

_DTYPES: Mapping[str, torch.dtype] = {
    "fp16": torch.float16,
    "float16": torch.float16,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
}
_NAMES = {"torch.float16": "fp16", "torch.bfloat16": "bf16"}
_ON_PURPOSE = "_error_feedback_was_declined"
_LONGEST = 1000  # characters of a description that are read
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
    if not isinstance(options.get("start_step", 0), numbers.Integral):
        raise OptionError(
            f"{name}(start_step=...) is a whole number of steps, such as 1000, got "
            f"{shown(options['start_step'])}"
        )
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
    elif "error_feedback" in wrapper_options:
        vars(built)[_ON_PURPOSE] = True  # besides the settings, which are frozen
    if wrapper_options.get("start_step"):
        built = DelayedStart(built, wrapper_options["start_step"])
    if wrapper_options.get("coalesce"):
        built = Coalesced(built)
    return built


def make_for_training(scheme: str | Scheme, **options: Any) -> Scheme:
    """Builds a scheme as :func:`make`, and says what to know before gradients go through it.

    Warns of a biased scheme that is given as an object without error feedback, unless the option
    ``error_feedback`` says that this is meant.
    """
    built = make(scheme, **options)
    biased = [] if "error_feedback" in options else list(_without_feedback(built))
    if biased:
        name = type(biased[0]).__name__
        warnings.warn(
            f"{name} is biased and runs without error feedback, so what a step leaves out is lost: "
            f"use ErrorFeedback({name}(...)), or pass error_feedback=False if this is meant",
            RuntimeWarning,
            stacklevel=user_stacklevel(),
        )
    for inside in walk(built):
        inside.advise()
    return built


def _without_feedback(scheme: Scheme) -> Iterator[Scheme]:
    """Yields the innermost biased schemes that average, and lack feedback by no one's decision."""
    if scheme.traits.biased and scheme.traits.returns == "mean" and _ON_PURPOSE not in vars(scheme):
        inside = [child for child in children(scheme) if child.traits.biased]
        for child in inside:
            yield from _without_feedback(child)
        if not inside:
            yield scheme


def as_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """Returns the torch dtype for a name such as "fp16" or "bf16", or the dtype itself."""
    chosen = dtype if isinstance(dtype, torch.dtype) else _DTYPES.get(dtype)
    if chosen is None or chosen not in _DTYPES.values():
        raise ValueError(
            f"make(wire_dtype=...) is one of {', '.join(map(repr, sorted(_DTYPES)))}, "
            f"torch.bfloat16 or torch.float16, got {dtype!r}"
        )
    return chosen


def _kind_of(scheme: object) -> str:
    kind = scheme if isinstance(scheme, type) else type(scheme)
    if issubclass(kind, Scheme):
        return f"the class {kind.__name__}, not {kind.__name__}(...)"
    if kind.__module__.startswith("torch.distributed.algorithms"):
        return f"torch's {kind.__name__}, whose settings are options here"
    return kind.__name__


def describe(scheme: Scheme) -> str:
    """Returns a scheme with all its settings as text; equal text means equal behaviour."""
    return repr(scheme)


def short_repr(scheme: Scheme) -> str:
    """Returns a scheme as it is typed, or the class with the settings that are not the default.

    ``describe`` has all settings.

    Example:
        >>> short_repr(make("int8"))
        'int8'
        >>> short_repr(make("powersgd", rank=2, start_step=100))
        'powersgd, rank=2, start_step=100'
    """
    text = describe(scheme)
    typed = as_typed(text)
    return typed if typed != text else _repr_of(scheme)


def as_typed(text: str) -> str:
    """Returns name and options for what ``describe`` returned, or the text itself if none fit.

    Args:
        text: may come from a file.
    """
    # A name without options first, and "none" before "allreduce", as in the documentation.
    names = ("none", *scheme_names())
    for name in names:
        try:
            if describe(make(name)) == text:
                return name
        except Exception:  # a user's scheme may need an option, or raise anything
            continue
    forms: list[list[str]] = []
    for layer in _layers(text):
        for name in names:
            for guess in _guesses(layer, name):
                options = _least(name, guess, text)
                if options is not None:
                    forms.append([name, *(f"{key}={options[key]!r}" for key in options)])
    least = min(forms, key=len, default=[text])
    return ", ".join(least)


def _least(name: str, options: dict[str, Any], text: str) -> dict[str, Any] | None:
    """Returns those of the options that are needed for a description; None: they do not give it."""
    least = None
    for left_out in (None, *options):
        fewer = {key: value for key, value in (least or options).items() if key != left_out}
        with suppress(Exception):  # options of a file, and schemes of users: anything may happen
            if describe(make(name, **fewer)) == text:
                least = fewer
        if least is None:
            return None
    return least


class _Layer(NamedTuple):
    """Holds a scheme inside of wrappers, and the options that stand for these wrappers."""

    kind: str
    settings: dict[str, ast.expr]
    options: dict[str, Any]
    feedback: bool


def _layers(text: str) -> Iterator[_Layer]:
    """Yields a described scheme, and those inside as far as options of ``make`` wrap them."""
    layer = _Layer("", {}, {}, False)
    # KeyError: a class of a user with a name of ours, and other settings.
    with suppress(KeyError, SyntaxError, ValueError, RecursionError, MemoryError):
        tree: ast.AST | None = ast.parse(text[:_LONGEST], mode="eval").body
        while isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name):
            settings = {part.arg: part.value for part in tree.keywords if part.arg}
            yield (layer := layer._replace(kind=tree.func.id, settings=settings))
            options, feedback = dict(layer.options), layer.feedback
            match layer.kind:
                case "ErrorFeedback" | "Scaled":
                    feedback = True
                case "DelayedStart":
                    options["start_step"] = ast.literal_eval(settings["start_step"])
                case "Coalesced":
                    options["coalesce"] = True
                case "Cast":
                    options["wire_dtype"] = _NAMES.get(ast.unparse(settings["dtype"]), "")
                case _:
                    return
            layer = layer._replace(options=options, feedback=feedback)
            tree = settings.get("scheme")


def _guesses(layer: _Layer, name: str) -> Iterator[dict[str, Any]]:
    """Yields options with which ``make`` may give a layer, error feedback named last."""
    factory = factory_of(name)
    if isinstance(factory, type) and factory.__name__ != layer.kind:
        return
    options = {}
    for key, default in (options_of(factory) or {}).items():
        with suppress(KeyError, ValueError):
            value = ast.literal_eval(layer.settings[key])
            if value != default:
                options[key] = value
    yield options | layer.options
    yield options | layer.options | {"error_feedback": layer.feedback}


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
        text = _inside(setting) if isinstance(setting, Scheme) else _repr_of(setting)
        if isinstance(setting, Scheme) and default is MISSING:
            parts.append(text)
        elif setting != default:
            parts.append(f"{field.name}={text}")
    return f"{type(value).__name__}({', '.join(parts)})"


def _inside(scheme: Scheme) -> str:
    """Returns a scheme within others as its name alone, or as its class, without options."""
    typed = as_typed(describe(scheme))
    return typed if typed in scheme_names() else _repr_of(scheme)
