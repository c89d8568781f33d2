"""A bucket runs through no more files, calls and modules than when they were last counted."""

from __future__ import annotations

import json

import pytest

from tests.house.run import COUNTS, KEPT, one_bucket
from tests.house.source import ROOT, counts, longest_chain


def test_one_bucket_takes_no_longer_way_than_before() -> None:
    before = json.loads(COUNTS.read_text())
    now = one_bucket()
    assert now.keys() == before.keys()
    longer = [
        f"{case}: {row[name]} {name}, {before[case][name]} when they were last counted"
        for case, row in now.items()
        for name in before[case]
        if row[name] > 1.05 * before[case][name]
    ]
    assert not longer, "\n".join([*longer, "python -m tests.house -v; --write keeps new counts"])


def test_what_runs_is_seen() -> None:
    before = json.loads(COUNTS.read_text())
    assert all(number > 10 for row in before.values() for number in row.values())
    assert before["torch:int8"].keys() == {*KEPT}


@pytest.mark.slow
def test_the_source_is_counted() -> None:
    numbers = counts()
    assert numbers["files: ddp_core"] == len(list((ROOT / "ddp_core").rglob("*.py")))
    assert 3 <= longest_chain("commhooks/hook") <= numbers["files: commhooks/hook"]
