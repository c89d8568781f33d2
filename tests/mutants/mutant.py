"""Reads planted bugs, and finds in the source the text that each changes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

__all__ = ["ROOT", "Mutant", "planted_bugs"]

_FOLDER = Path(__file__).parent
ROOT = _FOLDER.parents[1]
_PACKAGES = ("commhooks", "ddp_core", "kernels")


class Mutant(NamedTuple):
    """One wrong change of the source.

    Attributes:
        name: what is wrong, in a few words.
        where: qualified name of a function, class or constant of any module, so that files may
            move, as in "Engine.exchange"; or a file of C++ or CUDA, below the root of the project.
        old, new: text that occurs there once, and what takes its place.
        test: the test that has to fail then; a file, and a function in it or one of its cases.
    """

    name: str
    where: str
    old: str
    new: str
    test: str

    def planted_in(self, root: Path = ROOT) -> tuple[str, str]:
        """The file that has the text, below ``root``, and its source with this bug."""
        fits = []
        for file, begin, end in _places(self.where):
            source = (root / file).read_text()
            part = source[begin:end]
            after = part.replace(self.old, self.new)
            fits += [(file, source[:begin] + after + source[end:])] * part.count(self.old)
        if len(fits) != 1:
            raise ValueError(
                f"mutant {self.name!r}: its text occurs {len(fits)} times in {self.where}, not "
                f"once; the source has changed, write the mutant anew"
            )
        return fits[0]


def planted_bugs() -> list[Mutant]:
    """Reads the bugs of all files ``*.bugs`` beside this one.

    A line ``## Engine.exchange`` names the place of the bugs below it. A bug is a line with its
    name, a line with the test that finds it, lines with a minus and the old text, and lines with
    a plus and the new text; without a plus the old text goes. Text before the first place says
    what the file is about.
    """
    return [mutant for path in sorted(_FOLDER.glob("*.bugs")) for mutant in _bugs_in(path)]


def _bugs_in(path: Path) -> Iterator[Mutant]:
    _, *places = path.read_text().split("\n## ")
    for place in places:
        where, _, bugs = place.partition("\n")
        for bug in re.split(r"\n{2,}", bugs.strip("\n")):
            name, test, *lines = bug.split("\n")
            old, new = ("\n".join(line[1:] for line in lines if line[0] == sign) for sign in "-+")
            yield Mutant(name, where, old, new, test)


def _places(where: str) -> list[tuple[str, int, int]]:
    """Files with begin and end of the parts that have a name."""
    if "/" in where:
        return [(where, 0, len((ROOT / where).read_text()))]
    return _named().get(where, [])


@cache
def _named() -> dict[str, list[tuple[str, int, int]]]:
    places: dict[str, list[tuple[str, int, int]]] = {}
    for package in _PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            file = path.relative_to(ROOT).as_posix()
            if file.startswith("commhooks/kernels/"):  # a link
                continue
            source = path.read_text()
            starts = [0]
            for line in source.splitlines(keepends=True):
                starts.append(starts[-1] + len(line))
            for name, first, last in _definitions(ast.parse(source)):
                places.setdefault(name, []).append((file, starts[first - 1], starts[last]))
    return places


def _definitions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, int, int]]:
    """Qualified names with their first and last line, decorators included."""
    for inner in ast.iter_child_nodes(node):
        if isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            name = prefix + inner.name
            first = min([inner.lineno, *(decorator.lineno for decorator in inner.decorator_list)])
            yield name, first, inner.end_lineno or first
            yield from _definitions(inner, name + ".")
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            target = inner.targets[0] if isinstance(inner, ast.Assign) else None
            if isinstance(target, ast.Name):
                yield prefix + target.id, inner.lineno, inner.end_lineno or inner.lineno
            yield from _definitions(inner, prefix)
