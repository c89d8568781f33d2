"""Prints the packages that commhooks with an extra needs, for pip; uses the standard library alone.

``python experiments/tools/needs.py dev``: the Makefile installs them while kernels are compiled.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

__all__ = ["needs_of"]


def needs_of(extra: str, extras: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Yields what an extra needs, and what the extras need that it names.

    Example:
        >>> list(needs_of("dev", {"dev": ["ruff", "commhooks[cli]"], "cli": ["rich"]}))
        ['ruff', 'rich']
    """
    for requirement in extras[extra]:
        if match := re.fullmatch(r"commhooks\[(.*)\]", requirement):
            for name in match[1].split(","):
                yield from needs_of(name, extras)
        else:
            yield requirement


if __name__ == "__main__":
    import tomllib  # Python 3.11; the package supports 3.10

    pyproject = Path(__file__).parents[2] / "pyproject.toml"
    project = tomllib.loads(pyproject.read_text())["project"]
    print(*project["dependencies"], sep="\n")
    print(*needs_of(sys.argv[1], project["optional-dependencies"]), sep="\n")
