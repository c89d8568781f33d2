"""Some configurations at every run; ``python -m tests.fuzz --cases 2000`` for more."""

from __future__ import annotations

import os
import re
import time

import pytest

from tests.fuzz.__main__ import explore
from tests.fuzz.case import Case
from tests.fuzz.laws import REFUSALS, Verdict
from tests.fuzz.pool import Team
from tests.fuzz.runner import Runner
from tests.fuzz.sample import sample
from tests.fuzz.shrink import shrink

CASES, PARTS = 10, 4


@pytest.mark.distributed
@pytest.mark.parametrize("part", range(PARTS))
def test_random_configurations_obey_the_laws(part: int) -> None:
    figures = explore(range(part * CASES, (part + 1) * CASES), shrinks=15.0)
    assert not figures.findings, figures.show()


@pytest.mark.slow
@pytest.mark.distributed
def test_what_is_refused_says_why() -> None:
    runner = Runner()
    try:
        for reason, least in REFUSALS:
            verdict = runner.run(Case(**least))
            assert verdict.status == "refused", (least, verdict)
            assert re.search(reason, verdict.text), (least, verdict)
    finally:
        runner.restart()


def _ends(rank: int, size: int, how: str) -> str:
    if rank == 1 and how == "raised":
        raise ArithmeticError("on purpose")
    if rank == 1 and how == "died":
        os._exit(7)
    while rank == 1 and how == "hung":
        time.sleep(1)
    return how


def test_a_rank_that_raises_dies_or_hangs_is_reported() -> None:
    for store in ("file", "tcp"):
        team = Team(2, patience=1.0, store=store)
        assert team.run(_ends, "returned") == team.run(_ends, "returned") == ["returned"] * 2
        team.close()
    for how, text in (("raised", "on purpose"), ("died", "exit code 7"), ("hung", "_ends")):
        team = Team(2, patience=1.0)
        other, trouble = team.run(_ends, how)
        assert other == how
        assert trouble.kind == how
        assert text in trouble.text
        assert not team.usable


def test_a_case_is_one_line_that_says_all() -> None:
    for seed in range(50):
        case = sample(seed)
        assert Case.loads(case.dumps()) == case
        assert "\n" not in case.dumps()


def test_a_seed_gives_the_same_case_every_time() -> None:
    assert sample(11) == sample(11) != sample(12)


def test_unknown_fields_of_a_case_are_refused() -> None:
    with pytest.raises(ValueError, match="no such fields: \\['modell'\\]"):
        Case.loads('{"modell": ["front"]}')


def _needs_two(case: Case) -> Verdict:
    """A pretended defect of two features together."""
    broken = "static_graph" in case.ddp and any(event[1] == "save" for event in case.events)
    return Verdict("broken", "sum") if broken else Verdict("ok")


def test_shrinking_leaves_what_it_takes() -> None:
    case = Case(
        seed=7,
        host="core",
        world=4,
        scheme="topk",
        options={"coalesce": True},
        wrap=("guard",),
        model=("bf16", "scalar"),
        ddp={"static_graph": True, "bucket_cap_mb": 0.001},
        steps=7,
        micro=3,
        zero="keep",
        events=((2, "eval"), (5, "save")),
        legs=(3,),
    )
    small, verdict = shrink(case, "sum", _needs_two)
    assert verdict.status == "broken"
    assert small.features == {"ddp static_graph", "event save"}
    assert (small.steps, small.seed) == (1, 0)
