"""Pages and examples of frameworks: the lines of a page are in the script, and there are few."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import tomllib

from tests.frameworks.versions import FRAMEWORKS, PAGE, row_of, section, updated

ROOT = Path(__file__).parents[2]
SCRIPTS = {
    "accelerate": "in_accelerate.py",
    "fabric": "in_fabric.py",
    "lightning": "in_lightning.py",
    "ray": "in_ray.py",
    "transformers": "in_trainer.py",
}
# In pages, `py` and not `python`: the framework is needed to run them.
BLOCK = re.compile(r"^```py\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def script(name: str) -> str:
    return (ROOT / "docs" / "examples" / SCRIPTS[name]).read_text()


def squeezed(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_lines_of_a_page_are_those_of_its_script(name: str) -> None:
    page = (ROOT / "docs" / "integrations" / f"{name}.md").read_text()
    assert SCRIPTS[name] in page
    first = BLOCK.findall(page)[0]
    assert not [line for line in squeezed(first) if line not in squeezed(script(name))]


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_framework_takes_at_most_five_lines(name: str) -> None:
    """Lines count that import commhooks or use its hook, but for the printed summary."""
    lines = set()
    for node in ast.walk(ast.parse(script(name))):
        imported = isinstance(node, ast.ImportFrom) and (node.module or "").startswith("commhooks")
        if imported or (isinstance(node, ast.Name) and node.id in ("comm", "CommHook")):
            lines.add(node.lineno)
    printed = {n for n, line in enumerate(script(name).splitlines(), 1) if "summary()" in line}
    assert 2 <= len(lines - printed) <= 5


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_module_of_a_framework_has_at_most_80_lines_of_code(name: str) -> None:
    tree = ast.parse((ROOT / "commhooks" / "hosts" / f"{name}.py").read_text())
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(
            node
        ):
            node.body = node.body[1:] or [ast.Pass()]
    assert len(ast.unparse(tree).splitlines()) <= 80


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_framework_is_tested_and_in_the_navigation(name: str) -> None:
    assert (ROOT / "tests" / "frameworks" / f"test_{name}.py").exists()
    assert f"integrations/{name}.md" in (ROOT / "mkdocs.yml").read_text()
    assert f"::: commhooks.hosts.{name}" in (ROOT / "docs" / "reference" / "hosts.md").read_text()


def test_the_matrix_says_which_version_of_each_framework_passed_and_when() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = declared["optional-dependencies"]["frameworks"]
    assert {re.split(r"[\[><=;]", requirement)[0].strip() for requirement in wanted} == set(
        FRAMEWORKS
    )
    rows = [line for line in section(PAGE.read_text()) if line.startswith("| [")]
    for package, row in zip(FRAMEWORKS, rows, strict=True):
        assert row.startswith(row_of(package))
        assert re.search(r"\| [\d.]+\S* \| \d+\.\d+\.\d+ \| \d{4}-\d\d-\d\d \|$", row), row


def test_a_run_of_a_framework_changes_its_row_alone() -> None:
    before = PAGE.read_text()
    after = updated(before, {"ray": "9.9"}, "2.99.0", "2099-01-02")
    pairs = zip(before.splitlines(), after.splitlines(), strict=True)
    changed = [new for old, new in pairs if old != new]
    assert changed == [f"{row_of('ray')} 9.9 | 2.99.0 | 2099-01-02 |"]
