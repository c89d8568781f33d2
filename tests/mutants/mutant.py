"""What a planted bug is, and where in the source its text stands."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

__all__ = ["ROOT", "Mutant", "planted"]

ROOT = Path(__file__).parents[2]
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
        found = []
        for file, begin, end in _places(self.where):
            source = (root / file).read_text()
            part = source[begin:end]
            after = part.replace(self.old, self.new)
            found += [(file, source[:begin] + after + source[end:])] * part.count(self.old)
        if len(found) != 1:
            raise ValueError(
                f"mutant {self.name!r}: its text occurs {len(found)} times in {self.where}, not "
                f"once; the source has changed, write the mutant anew"
            )
        return found[0]


def planted(where: str, *bugs: tuple[str, str, str, str]) -> list[Mutant]:
    """Several bugs of one place: name, old text, new text, test."""
    return [Mutant(name, where, old, new, test) for name, old, new, test in bugs]


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
            first = min([inner.lineno, *(one.lineno for one in inner.decorator_list)])
            yield name, first, inner.end_lineno or first
            yield from _definitions(inner, name + ".")
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            target = inner.targets[0] if isinstance(inner, ast.Assign) else None
            if isinstance(target, ast.Name):
                yield prefix + target.id, inner.lineno, inner.end_lineno or inner.lineno
            yield from _definitions(inner, prefix)
