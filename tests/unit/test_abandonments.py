"""Ranks compare the steps that they have dropped, through a store."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from ddp_core import MismatchError, SharedStore
from ddp_core.reducer import _failures as abandoned
from ddp_core.reducer._failures import AbortAgreement


@pytest.mark.parametrize(
    ("ours", "theirs", "alike"),
    [
        ((3, 2, False), (3, 2, False), True),
        ((3, 2, False), (3, 4, False), False),
        ((3, 2, False), (4, 2, False), False),
        ((3, 2, False), (3, 2, True), False),
    ],
)
def test_only_ranks_that_have_dropped_alike_go_on(
    ours: Any, theirs: Any, alike: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(abandoned, "group_limit", lambda group: 20.0)
    store = SharedStore(dist.HashStore())

    def rank(number: int) -> str:
        group: Any = SimpleNamespace(rank=lambda: number, size=lambda: 2)
        known = AbortAgreement(group, store, "0")
        step, launched, told = theirs if number else ours
        for _ in range(3):  # may happen again
            known.record(step, launched, from_peer=told)
            try:
                known.agree()
            except MismatchError as error:
                return str(error)
            step += 1
        return ""

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(rank, range(2)))
    assert (found == ["", ""]) is alike
    assert found[0] == found[1]
