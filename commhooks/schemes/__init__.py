"""Provides the schemes; importing this package registers every scheme in its folder."""

import importlib
import pkgutil
from typing import Any

from commhooks.core._dense import Dense

__all__ = ["Dense"]


def __getattr__(name: str) -> Any:  # for type checkers, which cannot follow the loop below
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# Public names of all files become names of the package; files that begin with "_" only help.
for _file in pkgutil.iter_modules(__path__, f"{__name__}."):
    _module = importlib.import_module(_file.name)
    if not _file.name.rpartition(".")[2].startswith("_"):
        _names: list[str] = getattr(_module, "__all__", [])
        globals().update({name: getattr(_module, name) for name in _names})
        __all__ += _names
