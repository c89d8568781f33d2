"""Edits what the site's generator has read in the sources.

Docstrings in the form that it reads: Sphinx roles become links, and ``Example:`` becomes the
section that shows a session of Python. Where an object is in the repository. Schemes, which
``commhooks.schemes`` finds in its folder when it is imported. And names that the reference leaves
out: those that parts of the package call on each other.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from griffe import Alias, Extension, Module, Object

_ROLE = re.compile(r":(?:attr|class|func|meth|mod):`([\w.]+)`")
_EXAMPLE = re.compile(r"^( *)Example:$", re.MULTILINE)


def _linked(match: re.Match[str]) -> str:
    """A link where the reference has the name, code where it is a private module's or torch's."""
    name = match[1]
    public = re.match(r"(commhooks|ddp_core)\.", name) and "._" not in name
    return f"[`{name}`][{name}]" if public else f"`{name}`"


class Docstrings(Extension):
    """Rewrites docstrings as objects are loaded, and drops internal names once their package is.

    Args:
        repository: address that links to sources begin with; without it there are none.
        internal: names that are left out, by the class or module that has them.
    """

    def __init__(
        self, repository: str = "", internal: Mapping[str, list[str]] | None = None
    ) -> None:
        self._repository, self._internal = repository.rstrip("/"), internal or {}

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if self._repository and isinstance(obj.filepath, Path) and obj.lineno:
            path = obj.filepath.resolve().relative_to(Path.cwd()).as_posix()  # kernels is a link
            obj.extra["site"]["source"] = f"{self._repository}/blob/main/{path}#L{obj.lineno}"
        if obj.docstring:
            text = _ROLE.sub(_linked, obj.docstring.value)
            obj.docstring.value = _EXAMPLE.sub(r"\1Examples:", text)

    def on_package(self, *, pkg: Module, **_: Any) -> None:
        if pkg.name == "commhooks":
            _export_schemes(pkg["schemes"])
        for place, names in self._internal.items():
            package, _, path = place.partition(".")
            for name in names if package == pkg.name else ():
                holder = pkg[path] if path else pkg
                getattr(holder, "final_target", holder).del_member(name)


def _export_schemes(schemes: Module) -> None:
    """Makes the names of every public file of the folder names of the package."""
    for name, module in list(schemes.modules.items()):
        if name in (module.exports or []):  # its function takes the place of the file
            schemes.set_member(f"_{name}", module)
        for export in [] if name.startswith("_") else module.exports or []:
            alias = Alias(str(export), module[str(export)], parent=schemes)
            schemes.set_member(str(export), alias)
            schemes.exports.append(str(export))  # type: ignore[union-attr]
