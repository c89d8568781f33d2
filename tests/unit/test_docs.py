"""Examples in the pages run, their links lead somewhere, and the names in them exist."""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import json
import os
import pkgutil
import re
import shlex
import tempfile
from collections.abc import Iterator
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from textwrap import dedent
from types import ModuleType
from typing import Any

import pytest
import torch.distributed as dist
import yaml
from torch.nn.parallel import DistributedDataParallel
from typer.testing import CliRunner

import commhooks
import ddp_core
from commhooks import make
from commhooks.cli._app import app
from commhooks.errors import MissingPackageError
from commhooks.research._laws import Laws
from commhooks.research._laws_of_a_run import OF_A_RUN
from commhooks.research._laws_of_a_step import OF_A_STEP
from commhooks.research.conformance import check_scheme, laws_of
from tests.shelf import BASELINES, BUILT_IN
from tests.tools.command_line import run_cli
from tests.tools.harness import run_ranks

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("experiments/*/*.md")]
)
DESIGN = sorted([*(ROOT / "docs" / "design").glob("*.md"), ROOT / "CONTRIBUTING.md"])
# Schemes that do nothing to a gradient: their row in the table of schemes says all.
PLAIN = ("none", "allreduce", "noop")
# Options of every scheme, each with a value.
COMMON = {"start_step": 5, "error_feedback": True, "wire_dtype": "fp16", "coalesce": True}
# Arguments of functions of torch that pages name.
OF_TORCH = {"checkpoint_id", "drop_last", "use_local_synchronization", "weights_only"}
# Arguments of frameworks, and of the modules for them, which need the framework.
OF_FRAMEWORKS = {
    "comm_hook", "ddp_comm_hook", "ddp_comm_state", "log", "parallel_strategy", "resume_from",
    "resume_from_checkpoint", "save_on_each_node", "save_only_model", "save_weights_only",
    "strategy", "use_seedable_sampler",
}  # fmt: skip
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
# What docs/index.md says that examples assume. The hook registered last is replaced by the next.
PRELUDE = """
import sys, tempfile
import torch
import torch.distributed as dist
import commhooks
from torch.nn.parallel import DistributedDataParallel

folder = tempfile.mkdtemp()
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
path = f"{folder}/checkpoint.pt"
torch.manual_seed(0)
ddp_model = DistributedDataParallel(
    torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.ReLU(), torch.nn.Linear(96, 10))
)
optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.01)

def loss_of_batch():
    return ddp_model(torch.randn(8, 64)).square().mean()

def train(model, steps=3):
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of_batch().backward()
        optimizer.step()
"""


def names(pages: list[Path]) -> list[str]:
    return [page.relative_to(ROOT).as_posix() for page in pages]


def without_code(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


WITH_EXAMPLES = [page for page in PAGES if BLOCK.search(page.read_text())]


def _run_page(rank: int, world_size: int, code: str, folder: str) -> None:
    dist.destroy_process_group()  # the prelude makes its own
    os.chdir(folder)
    tempfile.tempdir = folder
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(code, "page", "exec"), {"__name__": "__main__"})


def _results() -> set[Path]:
    return {*ROOT.glob("results/**/*"), *ROOT.glob("[a-z]*/results/**/*")}


@pytest.mark.parametrize("page", WITH_EXAMPLES, ids=names(WITH_EXAMPLES))
def test_examples_run(page: Path, tmp_path: Path) -> None:
    """In a folder of its own, since pages write files, and what they write is not the tree's."""
    before = _results()
    blocks = BLOCK.findall(page.read_text())
    code = "\n".join(
        [PRELUDE, *blocks, "if dist.is_initialized():\n    dist.destroy_process_group()"]
    )
    run_ranks(_run_page, 1, code, str(tmp_path), ignore_warnings=(".*",), timeout=100)
    assert _results() <= before


def test_the_notebook_runs(tmp_path: Path) -> None:
    """Cells run in their order, in one process, with a backend that shows no window."""
    cells = json.loads((ROOT / "docs" / "examples" / "quickstart.ipynb").read_text())["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    code = f"import matplotlib\nmatplotlib.use('agg')\n{code}"
    run_ranks(_run_page, 1, code, str(tmp_path), ignore_warnings=(".*",), timeout=100)


def _schemes_of_the_guide() -> dict[str, type[commhooks.Scheme]]:
    """Returns the classes that the guide defines, without registering them."""
    page = ROOT / "docs" / "guides" / "new-scheme.md"
    body: list[ast.stmt] = []
    for node in ast.parse("\n".join(BLOCK.findall(page.read_text()))).body:
        if isinstance(node, ast.ClassDef):
            node.decorator_list = [
                each for each in node.decorator_list if "register_scheme" not in ast.unparse(each)
            ]
        slot = isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("Slot(")
        if slot or isinstance(node, (ast.Import, ast.ImportFrom, ast.ClassDef)):
            body.append(node)
    defined: dict[str, Any] = {"__name__": __name__}
    exec(compile(ast.Module(body, []), "new-scheme.md", "exec"), defined)
    return {node.name: defined[node.name] for node in body if isinstance(node, ast.ClassDef)}


@pytest.mark.parametrize(
    "laws", [OF_A_STEP, pytest.param(OF_A_RUN, marks=pytest.mark.slow)], ids=["step", "run"]
)
@pytest.mark.parametrize("name", ["TopK", "SharedScale", "SignOfMomentum"])
def test_schemes_of_the_guide_obey_the_laws(name: str, laws: Laws) -> None:
    scheme = _schemes_of_the_guide()[name]
    made = partial(make, scheme(), error_feedback=scheme.traits.biased)  # as by name
    promised = [text for text in laws_of(made()) if text in laws]
    assert not [verdict for verdict in check_scheme(made, promised) if not verdict.holds]


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", without_code(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def is_entry(page: Path, anchor: str) -> bool:
    """Returns whether a page of the reference describes the module of an existing name."""
    modules = re.findall(r"^::: ([\w.]+)$", page.read_text(), flags=re.MULTILINE)
    with contextlib.suppress(AttributeError, ImportError, ValueError):
        return anchor.startswith(tuple(modules)) and resolve_name(anchor) is not None
    return False


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for link in re.findall(r"\]\(([^)]+)\)", without_code(page)):
            if "://" in link:
                continue
            target, _, anchor = link.partition("#")
            file = (page.parent / target).resolve() if target else page
            assert file.exists(), f"{page.name}: {link}"
            there = not anchor or anchor in anchors(file) or is_entry(file, anchor)
            assert there, f"{page.name}: {link}"


SOURCES = [
    path
    for folder in ("commhooks", "ddp_core", "kernels", "experiments", "tests")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in {".py", ".cpp", ".cu", ".h"}
]


def test_pages_that_comments_name_exist() -> None:
    for source in SOURCES:
        for page in re.findall(r"\bdocs/[\w/-]+\.md", source.read_text()):
            assert (ROOT / page).exists(), f"{source}: {page}"


@pytest.mark.parametrize("page", DESIGN, ids=names(DESIGN))
def test_files_that_the_design_names_exist(page: Path) -> None:
    files = [path.as_posix() for path in SOURCES]
    for file in re.findall(r"`([\w/]+\.(?:py|cpp|cu|h))\b", without_code(page)):
        assert any(path.endswith(f"/{file}") for path in files) or (ROOT / file).exists(), file


def test_names_of_the_package_exist() -> None:
    for page in PAGES:
        for path in re.findall(r"(?<!/)\bcommhooks\.(?!md\b)([A-Za-z_]\w*)(?!/)", page.read_text()):
            there = hasattr(commhooks, path) or find_spec(f"commhooks.{path}")
            assert there, f"{page.name}: commhooks.{path}"


def tables(page: Path) -> list[list[str]]:
    """The rows of each table, code in them replaced by ``x``."""
    text = re.sub(r"`[^`\n]*`", "x", without_code(page))
    return [table.splitlines() for table in re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE)]


def test_tables_are_whole() -> None:
    """A rule below the heads, and as many cells in every row: else the rows show as pipes.

    What follows a blank line inside a table is a table without a rule.
    """
    for page in PAGES:
        for rows in tables(page):
            assert len({row.count("|") for row in rows}) == 1, f"{page.name}: {rows}"
            assert re.fullmatch(r"[| :-]*-[| :-]*", "".join(rows[1:2])), f"{page.name}: {rows[:3]}"


def parameters(module: ModuleType) -> set[str]:
    """The names of the arguments of all functions, classes and methods in a module."""
    known = set()
    for member in vars(module).values():
        methods = vars(member).values() if inspect.isclass(member) else ()
        for function in (member, *filter(inspect.isfunction, methods)):
            with contextlib.suppress(TypeError, ValueError):  # no function, or one of C
                known |= set(inspect.signature(function).parameters)
    return known


@cache
def options() -> frozenset[str]:
    """Names that may stand before ``=``: arguments of this package, and some of torch."""
    modules: list[ModuleType] = [commhooks, ddp_core]
    for package in (commhooks, ddp_core):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.endswith(("__main__", "libcommhooks_kernels")):
                with contextlib.suppress(MissingPackageError):  # the module of a framework
                    modules.append(import_module(module.name))
    others = {*inspect.signature(DistributedDataParallel).parameters, *OF_TORCH, *OF_FRAMEWORKS}
    return frozenset(others.union(COMMON, *map(parameters, modules)))


def test_schemes_and_options_in_the_text_exist() -> None:
    """Calls and ``option=value`` between backticks are looked up; blocks of code are run."""
    for page in PAGES:
        for code in re.findall(r"`([^`\n]+)`", without_code(page)):
            for scheme in re.findall(r"\b(?:make\(|switch\(|register\(\w+, )\"(\w+)\"", code):
                assert scheme in (*BUILT_IN, *BASELINES, "auto"), f"{page.name}: {code}"
            for option in re.findall(r"(?:^|\(|, )([a-z_]\w*)=(?!=)", code):
                assert option in options(), f"{page.name}: {code}"


SCHEMES = ROOT / "docs" / "schemes" / "index.md"


def listed_schemes() -> list[list[str]]:
    """The cells of the rows of the table of schemes."""
    table = SCHEMES.read_text().partition("|--:|\n")[2].partition("\n\n")[0]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()]


def test_the_table_of_schemes_is_what_the_command_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    printed = {}
    for line in CliRunner().invoke(app, ["schemes"]).output.splitlines():
        if line.startswith("│"):
            name, _, *facts = [cell.strip() for cell in line.strip("│").split("│")]
            printed[name.split()[0]] = facts  # one has a mark
    table = {
        name: facts
        for first, _, *facts in listed_schemes()
        for name in re.findall(r"`(\w+)`", first)
    }
    assert {name: facts for name, facts in printed.items() if name in BUILT_IN} == table
    assert sorted(table) == sorted(BUILT_IN)


# What a page shows of a command that measures nothing: the command, and what follows it.
SHOWN = re.compile(r"^```text\n\$ commhooks ((?:simulate|advise) .*?[^\\])\n(.*?)^```", re.M | re.S)


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        match.groups()
        for page in PAGES
        for match in SHOWN.finditer(page.read_text())
        if ".json" not in match[1]
    ],
)
def test_a_prediction_on_a_page_is_what_the_command_prints(
    command: str, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # for the files that a command writes
    printed = run_cli(*shlex.split(command.replace("\\\n", " ")), columns=80)
    assert " ".join(shown.split()) in " ".join(printed.split())


def test_the_options_listed_for_every_scheme_are_those_that_make_takes() -> None:
    table = SCHEMES.read_text().partition("## Options of every scheme")[2]
    assert set(re.findall(r"^\| `(\w+)`", table, flags=re.MULTILINE)) == set(COMMON)
    for name, value in COMMON.items():
        commhooks.make("topk", **{name: value})


@pytest.mark.parametrize("name", [name for name in BUILT_IN if name not in PLAIN])
def test_a_scheme_has_a_page(name: str) -> None:
    """The table links to a page with the name in one of its titles."""
    (link,) = re.findall(rf"\[`{name}`\]\((\w+\.md)", SCHEMES.read_text())
    titles = re.findall(r"^#+ (.*)$", (SCHEMES.parent / link).read_text(), flags=re.MULTILINE)
    assert any(f"`{name}`" in title for title in titles)


# ---- the reference, as mkdocs.yml and the pages of docs/reference ask for it


class Loader(yaml.SafeLoader):
    """Reads what mkdocs does, without the values of variables."""


Loader.add_constructor("!ENV", lambda loader, node: None)


def yaml_load(text: str) -> Any:
    return yaml.load(text, Loader)


def options_of_the_reference() -> dict[str, Any]:
    plugins = yaml_load((ROOT / "mkdocs.yml").read_text())["plugins"]
    (mkdocstrings,) = [each["mkdocstrings"] for each in plugins if isinstance(each, dict)]
    options: dict[str, Any] = mkdocstrings["handlers"]["python"]["options"]
    return options


def classes_of_the_reference() -> dict[type, set[str]]:
    """The classes that have an entry, and the names that they show if they inherit them."""
    usual, classes = options_of_the_reference(), {}
    for page in (ROOT / "docs" / "reference").glob("*.md"):
        text = page.read_text()
        for name, indented in re.findall(r"^::: ([\w.]+)\n((?: +.*\n)*)", text, re.MULTILINE):
            with contextlib.suppress(MissingPackageError):  # the module of a framework
                module = import_module(name)
                of_page = (yaml_load(dedent(indented)) or {"options": {}})["options"]
                for member in of_page.get("members", module.__all__):
                    if inspect.isclass(value := getattr(module, member)):
                        options = {**usual, **of_page}
                        classes[value] = set(options["inherited_members"])
    return classes


def test_the_reference_has_the_methods_that_pages_call() -> None:
    """Methods of a class, and of the base classes whose members its page shows."""
    classes, calls = classes_of_the_reference(), set()
    for page in PAGES:
        if "design" not in page.parts:
            for code in re.findall(r"```.*?```|`[^`\n]+`", page.read_text(), re.DOTALL):
                calls |= set(re.findall(r"[\w)\]]\.([a-z]\w*)\(", code))
    called, missing = 0, set()
    for shown, inherited in classes.items():
        ours = [base for base in shown.__mro__ if base.__module__.partition(".")[0] in PACKAGES]
        # A scheme need not repeat what its base class says, nor what torch says of its own.
        of_itself = (shown,) if issubclass(shown, commhooks.HookState) else tuple(classes)
        for name in sorted(calls - inherited):
            bases = [base for base in ours if inspect.isfunction(vars(base).get(name))]
            called += bool(bases)
            described = any(vars(base)[name].__doc__ for base in bases if base in of_itself)
            if bases and not described and not hasattr(shown.__mro__[len(ours)], name):
                missing.add(f"{shown.__name__}.{name}")
    assert called > 50
    assert not missing


def test_names_that_the_reference_leaves_out_exist() -> None:
    for extension in options_of_the_reference()["extensions"]:
        for place, names in extension["docs/_site/docstrings.py"]["internal"].items():
            module, _, last = place.rpartition(".")
            with contextlib.suppress(MissingPackageError):
                is_class = last[0].isupper()
                holder = getattr(import_module(module), last) if is_class else import_module(place)
                assert not [name for name in names if not hasattr(holder, name)], place


def test_the_reference_of_the_package_has_every_name() -> None:
    """A name has a description of its own, or a link to it."""
    page = (ROOT / "docs" / "reference" / "commhooks.md").read_text()
    (members,) = re.findall(r"members: \[(.*)\]", page)
    linked = re.findall(r"\[`(\w+)`\]", page)
    assert {*members.split(", "), *linked, "__version__"} == set(commhooks.__all__)


# ---- what public docstrings begin with

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


def test_variables_are_named_for_what_they_hold() -> None:
    places = {"one", "own", "found", "told", "mine", "it", "item"}  # in a sentence
    folders = [*PACKAGES, "tests", "experiments"]
    files = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    for path in (ROOT / "conftest.py", *files):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        names = {node.arg for node in nodes if isinstance(node, ast.arg)}
        names |= {
            node.id
            for node in nodes
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        }
        assert not names & places, path


@pytest.mark.parametrize("package", PACKAGES)
def test_modules_and_public_docstrings_begin_with_a_verb(package: str) -> None:
    wrong = []
    for path in sorted((ROOT / package).rglob("*.py")):
        if path.name == "_app.py":  # what the command line says of itself
            continue
        tree = ast.parse(path.read_text())
        module = (
            [("module", text.split()[0].strip(",:;"))] if (text := ast.get_docstring(tree)) else []
        )
        for name, word in [*module, *documented(tree)]:
            is_verb = word in ("Whether", "Raised") or (word.endswith("s") and word.isalpha())
            if not is_verb or word in NOUNS:
                wrong.append(f"{path.relative_to(ROOT)}: {name}: {word}")
    assert not wrong
