"""Imports follow the order of packages by layer, and of a package's folders by floor."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TypeGuard

import pytest

ROOT = Path(__file__).parents[2]
STANDARD = frozenset(sys.stdlib_module_names)
# What each layer may import when it is imported itself, beyond the standard library and itself.
ALLOWED = {
    "ddp_core": {"torch"},
    "kernels": {"torch", "ddp_core"},
    "commhooks": {"torch", "ddp_core"},
}
# What a module of a framework may import as well: its framework.
FRAMEWORKS = {
    "lightning.py": {"lightning"},
    "transformers.py": {"transformers"},
}
# What it may import later, inside a function; "*" stands for all of its modules.
LATER = {
    ("kernels", "cuda.py"): {"cupy", "numpy"},
    ("commhooks", "_ledger.py"): {"pandas"},
    ("commhooks", "_page.py"): {"matplotlib"},
    ("commhooks", "_run.py"): {"matplotlib"},
    ("commhooks", "_timeline.py"): {"matplotlib"},
    ("commhooks", "_verification.py"): {"pandas"},
    ("commhooks", "_tradeoff.py"): {"matplotlib"},
    ("commhooks", "_simulate.py"): {"matplotlib"},
    ("commhooks", "_powersgd.py"): {"numpy"},
    ("commhooks", "budget.py"): {"pandas"},
    ("commhooks", "trace.py"): {"pandas", "safetensors"},
    ("commhooks", "_traced.py"): {"safetensors"},
    ("commhooks", "torchft.py"): {"torchft"},
    ("ddp_core", "_timeline.py"): {"pandas", "matplotlib"},
}
# Floors of each package, the lowest first: a folder, or a file beside them, imports what is below.
FLOORS = {
    "ddp_core": ["_torch", "exchange", "reducer", "ddp"],
    "kernels": ["runtime"],
    "commhooks": [
        "_torch",
        "_version",
        "errors",
        "core",
        "wrappers",
        "schemes",
        "checkpoint",
        "verify",
        "hook",
        "collectives",
        "fsdp",
        "hosts",
        "zero",
        "report",
        "local",
        "optim",
        "hosts",
        "research",
        "predict",
        "auto",
        "classic",
        "ddp_comm_hooks",
        "hosts",
        "cli",
        "__main__",
    ],
}
# The command line is imported by nobody.
COMMAND_LINE = {"rich", "typer"}


class Import(NamedTuple):
    """One imported module, and whether importing the file imports it."""

    module: str
    at_import: bool


def modules(layer: str) -> list[Path]:
    """The files of a layer; commhooks/kernels is the layer of its own."""
    files = (ROOT / layer).rglob("*.py")
    return sorted(f for f in files if f.relative_to(ROOT).parts[:2] != ("commhooks", "kernels"))


def imports(tree: ast.AST, *, at_import: bool = True) -> Iterator[Import]:
    """All imports under a node; those for type checkers only are left out."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, at_import)
        elif isinstance(node, ast.ImportFrom):
            yield Import(node.module or "" if not node.level else ".", at_import)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        else:
            inside = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            yield from imports(node, at_import=at_import and not inside)


FILES = [(layer, path) for layer in ALLOWED for path in modules(layer)]


def test_a_module_imports_only_what_lies_below_its_layer() -> None:
    for layer, path in FILES:
        for imported in imports(ast.parse(path.read_text())):
            top = imported.module.partition(".")[0]
            allowed = {layer, "", *ALLOWED[layer]}
            if path.parent.name == "cli":
                allowed |= COMMAND_LINE
            if layer == "kernels":
                allowed -= {"commhooks"}
            if path.parent.name == "predict":  # arithmetic on tables, imported when it is asked for
                allowed |= {"numpy"}
            if path.parent.name == "hosts":
                allowed |= FRAMEWORKS.get(path.name, set())
            if not imported.at_import:
                allowed |= LATER.get((layer, path.name), set())
            assert top in allowed or top in STANDARD, f"{path.name} imports {imported.module}"


def test_kernels_know_of_ddp_core_the_errors_only() -> None:
    named = {name for path in modules("kernels") for name in _imported(path)}
    assert {name for name in named if name.startswith("ddp_core")} == {
        "ddp_core.exchange._errors.Error"
    }


def test_the_picture_sees_all_three_layers() -> None:
    assert {layer for layer, _ in FILES} == set(ALLOWED)
    assert len(FILES) > 20


def _imported(path: Path) -> set[str]:
    """Full names of what a file imports, also for type checkers only."""
    tree = ast.parse(path.read_text())
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("package", ["commhooks", "ddp_core"])
def test_a_folder_imports_only_what_lies_below_its_floor(package: str) -> None:
    floors, above = FLOORS[package], []
    for path in modules(package):
        place = path.relative_to(ROOT / package).with_suffix("").parts[0]
        if place == "__init__":
            continue
        assert place in floors, f"{place}: on which floor of {package} is it?"
        for name in _imported(path):
            first, _, rest = name.partition(".")
            floor = rest.partition(".")[0]
            if first == package and floor in floors and floors.index(floor) > floors.index(place):
                above.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not above


@pytest.mark.parametrize("package", ["commhooks", "ddp_core"])
def test_no_files_import_each_other_in_a_circle(package: str) -> None:
    files = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path
        for path in modules(package)
        if path.stem != "__init__"
    }
    graph = {}
    for module, path in files.items():
        named = [f"{name}." for name in _imported(path)]
        graph[module] = {
            other for other in files if any(name.startswith(f"{other}.") for name in named)
        } - {module}
    left = dict(graph)
    while ready := [
        package_name for package_name, below in left.items() if not below & left.keys()
    ]:
        for package in ready:
            del left[package]
    assert not left, sorted(left)


def mapped() -> list[str]:
    """The folders in the map of CONTRIBUTING.md, in its order."""
    table = (ROOT / "CONTRIBUTING.md").read_text().partition("| folder | holds |\n|---|---|\n")[2]
    rows = table.partition("\n\n")[0].splitlines()
    return [folder for row in rows for folder in re.findall(r"`([\w/]+)`", row.split("|")[1])]


def folders() -> set[str]:
    """All folders with files of their own, but for those of single studies."""
    paths = {ROOT / "experiments/tools"}
    for package in ("commhooks", "ddp_core", "kernels", "docs", "tests"):
        paths |= {ROOT / package, *(ROOT / package).rglob("*")}
    return {
        path.relative_to(ROOT).as_posix()
        for path in paths
        if path.name != "__pycache__"
        and not path.is_symlink()
        and any([*path.glob("*.py"), *path.glob("*.h")])
        and path.relative_to(ROOT).parts[:2] != ("commhooks", "kernels")
    }


def test_the_map_of_folders_is_complete_and_true() -> None:
    listed = mapped()
    assert len(set(listed)) == len(listed)
    assert not folders() - set(listed), "CONTRIBUTING.md has no row for these folders"
    assert all((ROOT / folder).is_dir() for folder in listed)


@pytest.mark.parametrize("package", ["commhooks", "ddp_core"])
def test_the_map_lists_folders_by_floor(package: str) -> None:
    parts = [folder.split("/") for folder in mapped()]
    listed = [rest[0] for first, *rest in parts if first == package and len(rest) == 1]
    assert listed == sorted(listed, key=FLOORS[package].index)


@pytest.mark.parametrize("layer", ["commhooks", "ddp_core", "kernels", "experiments"])
def test_a_module_names_each_constant_once(layer: str) -> None:
    # Two subjects in a file may name a constant alike: the second value would hold for both.
    for path in modules(layer):
        targets = [
            target
            for node in ast.parse(path.read_text()).body
            if isinstance(node, ast.Assign)
            for target in node.targets
        ]
        names = [name.id for target in targets for name in ast.walk(target) if _is_bound(name)]
        assert len(set(names)) == len(names), path


def _is_bound(node: ast.AST) -> TypeGuard[ast.Name]:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)


def test_no_lower_layer_reaches_up_as_text_either() -> None:
    for layer in ("ddp_core", "kernels"):
        for path in modules(layer):
            tree = ast.parse(path.read_text())
            names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
            assert not names & {"commhooks", "import_module", "__import__"}, path


IMPORTS = """
import sys
import torch, torch.nn.parallel
before = set(sys.modules)
import commhooks
print(*(name.partition(".")[0] for name in set(sys.modules) - before))
print(torch.cuda.is_initialized())
"""


def test_importing_commhooks_takes_nothing_heavy_and_no_cuda() -> None:
    """Told by what is loaded: the time depends on what else the machine does."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    packages, cuda = done.stdout.splitlines()
    assert cuda == "False"
    heavy = {"cupy", "pandas", "matplotlib", "tensorboard", "safetensors", "sklearn", "lightning"}
    assert not {*heavy, "accelerate", "transformers", "ray"} & set(packages.split())
    # Torch's flop counter takes triton, where torch was built for GPUs.
    ours = ("commhooks", "ddp_core", "triton")
    assert len([name for name in packages.split() if name not in ours]) < 20, packages


@pytest.mark.parametrize("package", ["commhooks", "ddp_core"])
def test_public_names_are_listed_and_exist(package: str) -> None:
    module = __import__(package)
    assert len(set(module.__all__)) == len(module.__all__)
    for name in module.__all__:
        assert hasattr(module, name), name


# Modules that users import by their names; the others begin with an underscore.
BY_NAME = {
    "commhooks": {"errors", "optim"},
    "commhooks/ddp_comm_hooks": {"*"},  # torch's names
    "commhooks/hosts": {
        "accelerate",
        "fabric",
        "lightning",
        "megatron",
        "ray",
        "torchft",
        "transformers",
    },
    "commhooks/research": {"budget", "conformance", "trace"},
    "commhooks/research/baselines": {"*"},
    "commhooks/schemes": {"*"},  # a file per scheme; what they share begins with an underscore
    "commhooks/cli/site": {"*"},  # Python imports it by this name
}
PACKAGES = sorted(
    path.parent.relative_to(ROOT).as_posix()
    for layer in ("commhooks", "ddp_core")
    for path in (ROOT / layer).rglob("__init__.py")
    if "kernels" not in path.parts  # ops: a module is called as its .cpp and .cu files
)


def test_modules_that_users_do_not_import_begin_with_an_underscore() -> None:
    for package in PACKAGES:
        names = {path.stem for path in (ROOT / package).glob("*.py")}
        public = {name for name in names if not name.startswith("_")}
        assert BY_NAME.get(package) == {"*"} or public == BY_NAME.get(package, set()), package


def test_a_package_lists_its_modules() -> None:
    """But for the two at the top, which list packages; ``_torch`` has torch's private names."""
    for package in PACKAGES:
        text = (ROOT / package / "__init__.py").read_text()
        names = {path.stem for path in (ROOT / package).glob("*.py")} - {
            "__init__",
            "__main__",
            "_torch",
        }
        missing = {name for name in names if not re.search(rf"\b{name}\b", text)}
        assert BY_NAME.get(package) == {"*"} or not missing, package
