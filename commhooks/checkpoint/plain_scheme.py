"""Schemes as dicts of plain values, which ``torch.load`` takes with its default ``weights_only``.

A scheme comes back through its class's constructor, which checks its settings, and only if the
class is known already: nothing in a file is imported or called.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from commhooks.core.scheme import Scheme
from commhooks.errors import CheckpointError

__all__ = ["from_plain", "to_plain"]

_CLASS, _SETTINGS = "class", "settings"


def to_plain(value: Any) -> Any:
    """A scheme, rule or setting in dicts, lists, numbers and strings.

    What has no such form (a scheme's own objects) is left as it is.
    """
    if is_dataclass(value) and not isinstance(value, type):
        names = [one.name for one in fields(value) if one.init]
        settings = {name: to_plain(getattr(value, name)) for name in names}
        return {_CLASS: _name(type(value)), _SETTINGS: settings}
    if isinstance(value, (list, tuple)):
        return [to_plain(one) for one in value]
    return value


def from_plain(value: Any) -> Any:
    """What ``to_plain`` was given; sequences are tuples.

    Raises:
        CheckpointError: of a class that is not imported, or of settings that it refuses.
    """
    if isinstance(value, list):
        return tuple(from_plain(one) for one in value)
    if not isinstance(value, Mapping):
        return value
    name, settings = value.get(_CLASS), value.get(_SETTINGS)
    known = {_name(one): one for one in _classes()}
    name = _without_module(name) if isinstance(name, str) else name
    if name not in known or not isinstance(settings, Mapping):
        raise CheckpointError(
            f"a saved scheme is of {str(name)[:200]!r}, which is not imported here; import it "
            f"before the state is loaded"
        )
    try:
        return known[name](**{str(key): from_plain(one) for key, one in settings.items()})
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"a saved scheme has settings that it refuses: {error}") from error


def _name(kind: type) -> str:
    return _without_module(f"{kind.__module__}.{kind.__qualname__}")


def _without_module(name: str) -> str:
    """The name of a class of this package without its file, which may change with a version."""
    package, _, rest = name.partition(".")
    return f"{package}.{rest.rpartition('.')[2]}" if package == "commhooks" else name


def _classes() -> Iterator[type]:
    from commhooks.wrappers.per_parameter import Rule

    found: list[type] = [Rule, Scheme]
    while found:
        kind = found.pop()
        yield kind
        found += kind.__subclasses__()
