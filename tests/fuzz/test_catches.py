"""The fuzzer is not blind: planted bugs break a law in cases that are right without them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fuzz.faults import CASES
from tests.fuzz.runner import Runner

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def clean() -> Iterator[Runner]:
    runner = Runner()
    yield runner
    runner.restart()


@pytest.fixture(scope="module")
def planted() -> Iterator[Runner]:
    runner = Runner(patience=5.0)
    yield runner
    runner.restart()


@pytest.mark.parametrize("bug", CASES)
def test_a_planted_bug_is_found(bug: str, clean: Runner, planted: Runner) -> None:
    verdict = clean.run(CASES[bug])
    assert verdict.status == "ok", verdict
    planted.plant = bug
    assert planted.run(CASES[bug]).status == "broken"
