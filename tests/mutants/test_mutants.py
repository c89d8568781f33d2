"""Every planted bug still fits the source, and names a test that is there."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache
from types import CodeType
from typing import Any

import pytest

from tests.mutants.mutant import ROOT, Mutant, planted_bugs

MUTANTS = planted_bugs()


def test_there_are_enough_and_each_has_a_name_of_its_own() -> None:
    names = [mutant.name for mutant in MUTANTS]
    assert len(set(names)) == len(names) >= 60


def test_every_mutant_fits_the_source_and_is_code() -> None:
    for mutant in MUTANTS:
        file, planted = mutant.planted_in()
        if file.endswith(".py"):
            assert _compiled(planted) != _program(file), mutant.name
        else:  # CUDA, which the emulator compiles
            assert planted != _source(file), mutant.name


@cache
def _source(file: str) -> str:
    return (ROOT / file).read_text()


@cache
def _program(file: str) -> tuple[Any, ...]:
    return _compiled(_source(file))


def _compiled(source: str) -> tuple[Any, ...]:
    """All that a program does, without the numbers of its lines: what comments change is no bug."""

    def parts(code: CodeType) -> tuple[Any, ...]:
        constants = [
            parts(value) if isinstance(value, CodeType) else (type(value), value)
            for value in code.co_consts
        ]
        return code.co_code, code.co_names, code.co_varnames, code.co_freevars, constants

    return parts(compile(source, "", "exec", dont_inherit=True))


def test_the_test_of_every_mutant_is_there() -> None:
    for mutant in MUTANTS:
        file, _, case = mutant.test.partition("::")
        name = case.partition("[")[0]
        there = re.search(rf"^def {name}\(", _source(file), re.MULTILINE)
        assert there, f"{mutant.name}: no test {mutant.test}"


def test_a_text_that_is_not_there_once_is_an_error() -> None:
    mutant = Mutant("twice", "Mutant.planted_in", "return", "yield", "tests/a.py::test_a")
    with pytest.raises(ValueError, match=r"'twice': its text occurs 0 times in Mutant\.planted_in"):
        mutant.planted_in()
    with pytest.raises(ValueError, match=r"'twice': its text occurs [0-9]+ times in Bucket, not"):
        mutant._replace(where="Bucket").planted_in()


@pytest.mark.slow
def test_every_test_of_a_mutant_is_among_those_of_make_test() -> None:
    tests = sorted({mutant.test for mutant in MUTANTS})
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-n", "0"]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", "-m", "not slow", *tests],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    quick = done.stdout.splitlines()
    assert not [
        test
        for test in tests
        if not any(case == test or case.startswith(f"{test}[") for case in quick)
    ]
