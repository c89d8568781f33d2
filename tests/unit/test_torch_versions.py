"""Private names of torch: used in one module per package, and recorded per version of torch.

``python -m tests.unit.test_torch_versions`` writes those of the present torch into
``tests/torch_names.txt``.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Collection, Iterator
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name

import pytest
import torch

import commhooks._torch
from tests.unit.test_layers import ROOT, modules

RECORD = ROOT / "tests" / "torch_names.txt"
HOMES = ("commhooks/_torch.py", "ddp_core/_torch.py", "kernels/_torch.py")
VERSION = torch.__version__.partition("+")[0]
LOOK_UPS = {"attrgetter", "delattr", "getattr", "hasattr", "setattr"}
# Modules that give our class the names of torch's, which are looked up at torch's class elsewhere.
MIRRORS = ("ddp_core/ddp/_torch_names.py",)
# Private names of others: the standard library's everywhere, and those of one framework.
STANDARD = {"_asdict", "_exit", "_fields", "_getframe", "_replace"}
FRAMEWORKS = {
    "commhooks/hosts/lightning.py": {"_ddp_kwargs", "_ddp_comm_hook"},
    "commhooks/hosts/torchft.py": {"_pg", "_timeout"},
}


@functools.cache
def trees() -> dict[str, ast.Module]:
    """Modules of all packages, by file."""
    files = [path for package in ("commhooks", "ddp_core", "kernels") for path in modules(package)]
    return {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in files}


def recorded() -> dict[tuple[str, str], list[str]]:
    """Versions that have a name, by owner and name."""
    lines = [line.split() for line in RECORD.read_text().splitlines() if line[:1] not in ("", "#")]
    return {(owner, name): versions for owner, name, *versions in lines}


def exists(owner: str, name: str) -> bool:
    """Returns whether torch has a name: an attribute, or one that its code gives to objects."""
    try:
        owned = resolve_name(owner)
    except (ImportError, AttributeError):
        return False
    if hasattr(owned, name) or (hasattr(owned, "__path__") and find_spec(f"{owner}.{name}")):
        return True
    if owner == "torch._C":  # a build without CUDA lacks some
        files = [Path(torch.__file__).parent / "_C" / "__init__.pyi"]
    else:  # the modules of a class and of its bases, or the module itself
        named = {getattr(kind, "__module__", owner) for kind in getattr(owned, "__mro__", [owned])}
        where = [
            getattr(sys.modules[module_name], "__file__", None)
            for module_name in named
            if module_name != "builtins"
        ]
        files = [Path(file) for file in where if file is not None and file.endswith(".py")]
    text = "".join(file.read_text() for file in files)
    return re.search(rf"\b{name}\b", text) is not None


def is_private(name: str) -> bool:
    return re.fullmatch(r"_[A-Za-z]\w*", name) is not None and not name.endswith("__")


def used(tree: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Private names that code uses, and what is imported from private modules of torch."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            yield node.attr, node
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in LOOK_UPS:
            yield from _strings(node)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch."):
            within = any(is_private(part) for part in str(node.module).split("."))
            for alias in node.names:
                if within or is_private(alias.name):
                    yield alias.name, node


def _strings(tree: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and is_private(str(node.value)):
            yield str(node.value), node


def own_names(without: Collection[str] = ()) -> set[str]:
    """All names that our code gives to something."""
    ours = set(STANDARD)
    for file, tree in trees().items():
        if file in without:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                ours.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                ours.add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                ours.add(node.id)
    return ours


def is_ours(node: ast.AST) -> bool:
    """Returns whether a name is looked up at ``self``, ``cls`` or ``super()``."""
    if not isinstance(node, ast.Attribute):
        return False
    at = node.value.func if isinstance(node.value, ast.Call) else node.value
    return isinstance(at, ast.Name) and at.id in ("self", "cls", "super")


def test_no_other_module_uses_a_private_name_of_torch() -> None:
    of_torch = {name for _, name in recorded()}
    own_here, own_elsewhere = own_names(), own_names(without=MIRRORS)
    wrong = []
    for file, tree in trees().items():
        if file in HOMES:
            continue
        names_here = own_here if file in MIRRORS else own_elsewhere
        for name, node in used(tree):
            chain = ast.unparse(node.value) if isinstance(node, ast.Attribute) else ""
            is_torchs = chain.partition(".")[0] in ("torch", "dist") or isinstance(
                node, ast.ImportFrom
            )
            unknown = isinstance(node, ast.Attribute) and name not in names_here
            if not is_torchs and not unknown and (name not in of_torch or is_ours(node)):
                continue
            if name not in FRAMEWORKS.get(file, ()):
                wrong.append(f"{file}:{node.lineno}: {name}")
    assert not wrong, "a private name of torch belongs into the _torch.py of its package"


def test_every_private_name_is_recorded() -> None:
    homes = [trees()[file] for file in HOMES]
    named = {name for tree in homes for name, _ in (*used(tree), *_strings(tree))}
    named |= {value.rpartition(":")[2] for value in commhooks._torch._LATER.values()}
    assert named == {name for _, name in recorded()}


def test_the_present_torch_has_the_names_of_the_record() -> None:
    record = recorded()
    versions = next(line for line in RECORD.read_text().splitlines() if "Versions:" in line)
    if VERSION not in versions.split():
        pytest.skip(f"torch {VERSION} is not recorded: python -m tests.unit.test_torch_versions")
    differ = [
        f"{owner} {name}"
        for (owner, name), having in record.items()
        if exists(owner, name) is not (VERSION in having)
    ]
    assert not differ


def write() -> None:
    """Writes which names the present torch has into the record."""
    head, *_ = RECORD.read_text().partition("\n\n")
    known = set(head[head.index("Versions:") :].split()[1:]) | {VERSION}
    order = sorted(known, key=lambda name: [int(part) for part in name.split(".")])
    lines = []
    for (owner, name), versions in sorted(recorded().items()):
        has = (set(versions) - {VERSION}) | ({VERSION} if exists(owner, name) else set())
        lines.append(" ".join([owner, name, *(version for version in order if version in has)]))
    head = head[: head.index("Versions:")] + "Versions: " + " ".join(order)
    RECORD.write_text(head + "\n\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    write()
