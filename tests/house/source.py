"""Counts files, lines, imports and private attributes of the source."""

from __future__ import annotations

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path

__all__ = ["ROOT", "counts", "longest_chain", "trees"]

ROOT = Path(__file__).parents[2]
PACKAGES = ("commhooks", "ddp_core", "kernels")


@cache
def trees() -> dict[str, ast.Module]:
    """The files of the packages, below the root of the project."""
    paths = [path for name in PACKAGES for path in sorted((ROOT / name).rglob("*.py"))]
    return {
        name: ast.parse(path.read_text())
        for path in paths
        if not (name := path.relative_to(ROOT).as_posix()).startswith("commhooks/kernels/")
    }


def counts() -> dict[str, int]:
    """The counts by what they are of."""
    importers = _importers()
    files = [file for file in trees() if not file.endswith("__init__.py")]
    numbers = {
        f"files: {folder}": sum(file.startswith(f"{folder}/") for file in trees())
        for folder in (
            *PACKAGES,
            *sorted({str(Path(f).parent) for f in trees() if f.count("/") > 1}),
        )
    }
    numbers["lines without tests"] = sum(
        path.read_text().count("\n")
        for name in (*PACKAGES, "experiments")
        for path in (ROOT / name).rglob("*.*")
        if path.suffix in (".py", ".cpp", ".cu", ".h")
        and not path.name.startswith("test_")
        and not path.relative_to(ROOT).as_posix().startswith("commhooks/kernels/")
    )
    numbers["files imported by exactly one other"] = sum(
        len({importer for importer in importers[file] if not importer.endswith("__init__.py")}) == 1
        for file in files
    )
    numbers["private attributes of others used in commhooks"] = _private_uses()
    return numbers


def longest_chain(folder: str) -> int:
    """The number of files of a folder of which each imports the next."""
    importers = _importers()
    inside = [f for f in trees() if f.startswith(f"{folder}/") and not f.endswith("__init__.py")]

    @cache
    def length(file: str) -> int:
        return 1 + max((length(above) for above in importers[file] & set(inside)), default=0)

    return max(map(length, inside), default=0)


@cache
def _importers() -> defaultdict[str, set[str]]:
    """By file those that import it, names behind a package's ``__init__`` included."""
    files = {_module(file): file for file in trees()}
    importers: defaultdict[str, set[str]] = defaultdict(set)
    behind: dict[str, str] = {}
    for file in trees():
        if file.endswith("__init__.py"):
            for name, source in _imports(file):
                if source in files:
                    behind[f"{_module(file)}.{name}"] = source
    for file in trees():
        for name, source in _imports(file):
            full = f"{source}.{name}"
            target = files.get(full) or files.get(behind.get(full, "")) or files.get(source)
            if target not in (None, file):
                importers[str(target)].add(file)
        for node in ast.walk(trees()[file]):  # an entry point as text
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                target = files.get(node.value.partition(":")[0]) if ":" in node.value else None
                if target not in (None, file):
                    importers[str(target)].add(file)
    return importers


def _module(file: str) -> str:
    name = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return f"commhooks.{name}" if name.split(".")[0] == "kernels" else name


def _imports(file: str) -> list[tuple[str, str]]:
    """Names that a file imports, each with its module."""
    names = []
    package = _module(file).split(".")
    if not file.endswith("__init__.py"):
        package = package[:-1]
    for node in ast.walk(trees()[file]):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *filter(None, [node.module])])
            names += [(alias.name, source) for alias in node.names]
        elif isinstance(node, ast.Import):
            names += [("", alias.name) for alias in node.names]
    return names


def _private_uses() -> int:
    """Uses of ``x._name`` where x is not the object itself, its class or a module.

    Methods of named tuples are public, and ``_torch.py`` is where torch's private names are used.
    """
    local = {"self", "cls", "super"}
    public = {"_replace", "_asdict", "_fields"}
    return sum(
        isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and node.attr not in public
        and not (isinstance(node.value, ast.Name) and node.value.id in local)
        and not (isinstance(node.value, ast.Call) and getattr(node.value.func, "id", "") in local)
        for file, tree in trees().items()
        if file.startswith("commhooks/") and not file.endswith("_torch.py")
        for node in ast.walk(tree)
    )
