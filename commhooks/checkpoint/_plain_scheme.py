"""Converts schemes to dicts of plain values, which ``torch.load`` takes by default, and back.

A scheme is rebuilt by the constructor of its class, which checks the settings, and only if the
class is one of this package's that touches no file, or one that the program has added to torch's
safe globals: a file cannot make this module import or call anything else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from commhooks.core._registry import import_of_class
from commhooks.core._scheme import Scheme
from commhooks.core._settings import printable, shown
from commhooks.errors import CheckpointError
from commhooks.wrappers._per_parameter import Rule

__all__ = ["from_plain", "to_plain"]

_CLASS, _SETTINGS = "class", "settings"
_DEEPEST = 64  # schemes and lists within each other
# Settings in states of earlier versions.
_FIXED_OF_GUARD = {"max_residual": 100.0, "growth": 10.0, "rest": 1000, "sample": 4096}


def to_plain(value: Any) -> Any:
    """Converts a scheme, rule or setting to dicts, lists, numbers and strings.

    Objects without such a form, which a user's scheme may have, are left as they are.
    """
    if is_dataclass(value) and not isinstance(value, type):
        # The constructor computes the other fields.
        names = [field.name for field in fields(value) if field.init]
        settings = {name: to_plain(getattr(value, name)) for name in names}
        return {_CLASS: _name(type(value)), _SETTINGS: settings}
    if isinstance(value, (list, tuple)):
        return [to_plain(element) for element in value]
    return value


def from_plain(value: Any, *, inside: int = 0) -> Any:
    """Inverts ``to_plain``, with tuples for lists.

    Args:
        inside: number of schemes and lists around it.

    Raises:
        CheckpointError: the class is not imported, is none that a file may name, or refuses the
            settings.
    """
    if inside > _DEEPEST:
        raise CheckpointError("a saved scheme is nested too deeply; the file is damaged")
    # Tuples, since a scheme with a list in its settings has no hash.
    if isinstance(value, list):
        return tuple(from_plain(element, inside=inside + 1) for element in value)
    if not isinstance(value, Mapping):
        return value
    name, settings = value.get(_CLASS), value.get(_SETTINGS)
    # Not only registered schemes: wrappers and users' classes as well.
    known = {_name(kind): kind for kind in _classes()}
    name = _without_module(name) if isinstance(name, str) else shown(name)
    if name not in known or not isinstance(settings, Mapping) or not all(map(_is_text, settings)):
        needed = import_of_class(name)
        advice = f"`{needed}`" if needed else "import it"
        raise CheckpointError(
            f"a saved scheme is of {shown(name)}, which is not imported here; {advice} before "
            f"the state is loaded"
        )
    kind = known[name]
    if not _may_be_named(kind):
        raise CheckpointError(
            f"a saved scheme is of {name!r}, which a file may not choose unless the program "
            f"allows it: torch.serialization.add_safe_globals([{kind.__name__}]). Or save "
            f"hook.state_dict(), which continues on the scheme that is registered"
        )
    inner = {key: from_plain(setting, inside=inside + 1) for key, setting in settings.items()}
    # What ``rounding`` was before; anything else than a bool is refused by the class.
    if name == "commhooks.Blockwise" and isinstance(inner.get("stochastic"), bool):
        before = "stochastic" if inner.pop("stochastic") else "nearest"
        inner.setdefault("rounding", before)
    if name == "commhooks.Guard":
        _drop_fixed_settings(inner)
    try:
        return kind(**inner)
    except Exception as error:  # a constructor may raise anything at settings of any type
        raise CheckpointError(
            f"a saved scheme has settings that it refuses: {printable(str(error))}"
        ) from error


def _drop_fixed_settings(settings: dict[str, Any]) -> None:
    """Removes former settings of a saved Guard; raises unless they have their fixed values."""
    for name, fixed in _FIXED_OF_GUARD.items():
        if settings.pop(name, fixed) != fixed:
            raise CheckpointError(
                f"a saved scheme is a Guard with another {name!r} than {fixed!r}, which it always "
                f"has. Save hook.state_dict(), which continues on the scheme that is registered"
            )


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _may_be_named(kind: type) -> bool:
    """Whether a file may name a class, which only computes, or which the program has allowed."""
    touches_files = issubclass(kind, Scheme) and kind.touches_files
    if kind.__module__.partition(".")[0] == "commhooks" and not touches_files:
        return True
    allowed = torch.serialization.get_safe_globals()
    return any(kind is (entry[0] if isinstance(entry, tuple) else entry) for entry in allowed)


def _name(kind: type) -> str:
    return _without_module(f"{kind.__module__}.{kind.__qualname__}")


def _without_module(name: str) -> str:
    """Returns a class's name without its file, which may change, if it is of this package."""
    package, _, rest = name.partition(".")
    return f"{package}.{rest.rpartition('.')[2]}" if package == "commhooks" else name


def _classes() -> Iterator[type]:
    """Yields all classes of rules and schemes that are imported."""
    to_visit: list[type] = [Rule, Scheme]
    while to_visit:
        kind = to_visit.pop()
        yield kind
        to_visit += kind.__subclasses__()
