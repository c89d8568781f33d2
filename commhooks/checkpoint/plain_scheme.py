"""Converts schemes to dicts of plain values, which ``torch.load`` takes by default, and back.

A scheme is rebuilt by the constructor of its class, which checks the settings, and only if the
class is imported already: a file cannot make this module import or call anything else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from commhooks.core.scheme import Scheme
from commhooks.errors import CheckpointError
from commhooks.wrappers.per_parameter import Rule

__all__ = ["from_plain", "to_plain"]

_CLASS, _SETTINGS = "class", "settings"


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
        return [to_plain(item) for item in value]
    return value


def from_plain(value: Any) -> Any:
    """Returns what ``to_plain`` converted, with tuples for lists.

    Raises:
        CheckpointError: the class is not imported, or refuses the settings.
    """
    # Tuples, since a scheme with a list in its settings has no hash.
    if isinstance(value, list):
        return tuple(from_plain(item) for item in value)
    if not isinstance(value, Mapping):
        return value
    name, settings = value.get(_CLASS), value.get(_SETTINGS)
    # Not only registered schemes: wrappers and users' classes as well.
    known = {_name(kind): kind for kind in _classes()}
    name = _without_module(name) if isinstance(name, str) else name
    if name not in known or not isinstance(settings, Mapping):
        raise CheckpointError(
            f"a saved scheme is of {str(name)[:200]!r}, which is not imported here; import it "
            f"before the state is loaded"
        )
    try:
        return known[name](**{str(key): from_plain(item) for key, item in settings.items()})
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"a saved scheme has settings that it refuses: {error}") from error


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
