"""The fuzzer is not blind: planted bugs break a law in cases that are right without them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fuzz.case import Case
from tests.fuzz.faults import BUGS
from tests.fuzz.runner import Runner

pytestmark = pytest.mark.distributed

# A case that shows each bug; `python -m tests.fuzz --plant NAME` looks for others.
CASES = {
    "residual_dropped": Case(scheme="topk"),
    "residual_two_percent_off": Case(host="core", scheme="onebit"),
    "step_never_ends": Case(scheme="int4"),
    "draw_differs_by_rank": Case(scheme="random_k"),
    "mean_over_one_rank_less": Case(host="core", world=3),
    "bad_step_is_kept": Case(scheme="topk", events=((2, "poison", "middle", "nan"),)),
    "raised_step_is_kept": Case(
        host="core", scheme="topk", ddp={"bucket_cap_mb": 0.0005}, events=((1, "raise", "last"),)
    ),
    "switch_forgets_residual": Case(scheme="topk", events=((2, "switch", "none", {}),)),
    "load_takes_rank_zeros": Case(scheme="onebit", events=((2, "resume", "torch"),)),
    "unused_are_overwritten": Case(
        host="core", model=("branches",), use="once", ddp={"find_unused_parameters": True}
    ),
    "small_gradients_of_rank_one_count_half": Case(host="core", micro=2),
    "one_rank_waits": Case(scheme="bf16"),
    "joined_rank_keeps_its_model": Case(host="core", join=1),
    "feedback_is_off": Case(host="core", scheme="random_k"),
    "small_gradients_are_lost": Case(scaled=True),
    "host_forgets_to_divide": Case(host="fsdp2"),
    "shard_of_another_rank": Case(host="fsdp2", scheme="int8"),
    "what_comes_from_other_nodes_is_lost": Case(host="hsdp", world=4, setting=("between",)),
    "all_ranks_are_replicas": Case(host="tensor_parallel", world=4),
    "a_group_gives_the_mean_for_a_sum": Case(host="group"),
    "collectives_sum_for_a_mean": Case(host="collectives", setting=("all_reduce",)),
    "names_share_what_they_keep": Case(
        host="collectives", scheme="topk", setting=("all_reduce",), model=("large",)
    ),
    "units_are_divided_twice": Case(host="fsdp1", setting=("FULL_SHARD",)),
    "a_bad_shard_is_stepped": Case(host="zero", events=((1, "poison", "middle", "nan"),)),
    "a_bad_distance_is_taken": Case(host="diloco", events=((1, "poison", "middle", "nan"),)),
    "a_tcp_store_is_not_known": Case(host="core", store="tcp"),
    "process_dies": Case(),
}


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


def test_every_bug_has_a_case() -> None:
    assert set(CASES) == set(BUGS)


@pytest.mark.parametrize("bug", CASES)
def test_a_planted_bug_is_found(bug: str, clean: Runner, planted: Runner) -> None:
    verdict = clean.run(CASES[bug])
    assert verdict.status == "ok", verdict
    planted.plant = bug
    assert planted.run(CASES[bug]).status == "broken"
