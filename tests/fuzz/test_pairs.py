"""Some pairs of features at every run; ``python -m tests.fuzz.pairs`` runs all of them."""

from __future__ import annotations

import re
from itertools import islice

import pytest

from tests.fuzz.pairs import (
    ALONE,
    APART,
    FEATURES,
    HOSTS,
    TOGETHER,
    UNRELIABLE,
    case_of,
    pairs,
    run_pairs,
    wrong,
)
from tests.fuzz.runner import Runner

SOME = 20  # pairs of each class


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("host", HOSTS)
def test_pairs_obey_the_laws_or_are_refused_as_expected(host: str) -> None:
    verdicts = run_pairs([(host, *pair) for pair in islice(pairs(host), SOME)], processes=1)
    assert len(verdicts) == SOME
    assert not wrong(verdicts), "\n".join(wrong(verdicts))


@pytest.mark.slow
@pytest.mark.distributed
def test_what_a_class_refuses_by_itself_says_why() -> None:
    runner = Runner()
    try:
        for (host, name), reason in ALONE.items():
            case = case_of(host, name)
            assert case is not None
            verdict = runner.run(case)
            assert verdict.status == "refused", (host, name, verdict)
            assert re.search(reason, verdict.text), (host, name, verdict)
    finally:
        runner.restart()


@pytest.mark.slow
def test_every_feature_is_in_pairs_and_the_tables_name_features() -> None:
    for host in HOSTS:
        met = {name for pair in pairs(host) for name in pair}
        left_out = {*ALONE, *UNRELIABLE}
        assert met == {name for name in FEATURES if (host, name) not in left_out}
    named = {name for pair in (*TOGETHER, *APART) for name in pair}
    assert named | {name for _, name in ALONE} <= set(FEATURES)
