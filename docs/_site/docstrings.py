"""Docstrings as editors show them, in the form that the site's generator reads.

Sphinx roles become links, and ``Example:`` becomes the section that shows a session of Python.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

_ROLE = re.compile(r":(?:attr|class|func|meth|mod):`([\w.]+)`")
_EXAMPLE = re.compile(r"^( *)Example:$", re.MULTILINE)


def _linked(match: re.Match[str]) -> str:
    """A link where the reference has the name, code where it is a private module's or torch's."""
    name = match[1]
    public = re.match(r"(commhooks|ddp_core)\.", name) and "._" not in name
    return f"[`{name}`][{name}]" if public else f"`{name}`"


class Docstrings(Extension):
    """Rewrites every docstring once its object is loaded."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring:
            text = _ROLE.sub(_linked, obj.docstring.value)
            obj.docstring.value = _EXAMPLE.sub(r"\1Examples:", text)
