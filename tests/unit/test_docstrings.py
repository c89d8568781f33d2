"""What public docstrings begin with."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ["commhooks", "ddp_core", "kernels"]
NOUNS = {"Buckets", "Bytes", "Gradients", "Indices", "Messages", "Parameters", "Settings"}
NOUNS |= {"As", "Buffers", "Events", "Figures", "Futures", "Sizes", "Those", "This", "Views"}


def documented(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yields the names of public classes and functions, and what their docstrings begin with."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and not node.name.startswith("_"):
            text = ast.get_docstring(node)
            if text:
                yield prefix + node.name, text.split()[0].strip(",:;")
            if isinstance(node, ast.ClassDef):
                yield from documented(node, f"{node.name}.")


@pytest.mark.parametrize("package", PACKAGES)
def test_public_docstrings_begin_with_a_verb(package: str) -> None:
    wrong = []
    for path in sorted((ROOT / package).rglob("*.py")):
        if path.name == "_app.py":  # what the command line says of itself
            continue
        for name, word in documented(ast.parse(path.read_text())):
            is_verb = word in ("Whether", "Raised") or (word.endswith("s") and word.isalpha())
            if not is_verb or word in NOUNS:
                wrong.append(f"{path.relative_to(ROOT)}: {name}: {word}")
    assert not wrong
