"""The command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from typer.testing import CliRunner

from commhooks import _registry, names
from commhooks._cli import app
from commhooks.conformance import LAWS
from commhooks.kernels import _cpu, use_kernels


def doctor() -> str:
    done = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    return done.output


def row(output: str, name: str) -> str:
    (found,) = (line for line in output.splitlines() if f" {name} " in line)
    return found


def test_doctor_says_which_kernels_run() -> None:
    output = doctor()
    assert _cpu.instruction_set() in row(output, "CPU kernels")
    assert "kernel" in row(output, "quantize")


def test_doctor_says_why_kernels_do_not_run() -> None:
    with mock.patch.object(_cpu, "_library", return_value=None):
        output = doctor()
    assert "install g++" in row(output, "CPU kernels")
    assert "definition" in row(output, "quantize")
    with use_kernels("definition"):
        assert "definition" in row(doctor(), "quantize")


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})


@pytest.fixture
def forget_new_schemes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_registry, "_factories", dict(_registry._factories))


def test_schemes_lists_the_registry() -> None:
    output = invoke("schemes").output
    assert set(names()) <= set(output.split())
    assert "Blockwise" in row(output, "int8")
    assert "8.12" in row(output, "int8")


@pytest.mark.usefixtures("forget_new_schemes")
def test_a_new_scheme_obeys_all_laws_as_it_stands(tmp_path: Path) -> None:
    path = tmp_path / "my_scheme.py"
    assert invoke("new", "my_scheme", "--out", str(path)).exit_code == 0
    assert len(path.read_text().splitlines()) < 50
    done = invoke("check", str(path))
    assert done.exit_code == 0, done.output
    assert done.output.count("holds") == len(LAWS)
    assert "my_scheme" in names()


@pytest.mark.usefixtures("forget_new_schemes")
def test_a_scheme_of_a_file_is_listed_with_all_others(tmp_path: Path) -> None:
    path = tmp_path / "listed.py"
    invoke("new", "listed", "--out", str(path))
    assert "Listed" in row(invoke("schemes", str(path)).output, "listed")


@pytest.mark.usefixtures("forget_new_schemes")
def test_check_names_the_law_that_is_broken_and_fails(tmp_path: Path) -> None:
    path = tmp_path / "hides.py"
    invoke("new", "hides", "--out", str(path))
    path.write_text(path.read_text().replace("grad.abs()", "grad.nan_to_num().abs()"))
    done = invoke("check", str(path))
    assert done.exit_code == 1
    (broken,) = (line for line in done.output.splitlines() if "broken" in line)
    assert "not finite" in broken
    assert "inf at 0" in broken


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["new", "int8"], "taken"),
        (["new", "Not A Name"], "small letters"),
        (["check", "nothing.py"], "no file nothing.py"),
        (["check", "noop"], "does not average"),
    ],
)
def test_wrong_arguments_are_named(arguments: list[str], words: str) -> None:
    done = invoke(*arguments)
    assert done.exit_code == 2
    assert words in done.output
