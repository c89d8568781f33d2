"""The bandwidth study: what it compares, computes and says; how its links are made."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commhooks
from experiments.bandwidth.links import bucket_count, computed, how_made, parse, settings_on
from experiments.bandwidth.plots import when_it_pays
from experiments.bandwidth.sentences import HOW_TO_READ, verdict
from experiments.bandwidth.table import SHOWN, compared, computed_cases, printed
from experiments.tools import namespaces
from experiments.tools.gradient_error import GradientError
from experiments.tools.schemes import NO_HOOK, ON_LINKS, SCHEMES, VARIANTS, gives_mean
from experiments.tools.training import Settings
from tests.shelf import BASELINES, BUILT_IN

GIGABIT = parse("1gbit")


def case(hook: str, block_s: list[float], **other: Any) -> dict[str, Any]:
    usual = {
        "task": "characters", "hook": hook, "block_s": block_s, "exposed_s": 0.001, "loss": 2.5,
        "accuracy": 0.3, "window_s": 0.004, "relative_error": 0.01, "ranks_agree": True,
        "dense_bytes": 4e6, "dense_wire_bytes": 4e6, "payload_bytes": 1e6, "wire_bytes": 1e6,
    }  # fmt: skip
    return usual | other


def table(*cases: dict[str, Any], how: str = "measured") -> pd.DataFrame:
    return compared(GIGABIT, how, cases, cases)


def text_of(shown: Any) -> str:
    console = Console(width=80, record=True, force_terminal=False)
    with console.capture() as captured:
        console.print(shown)
    return captured.get()


def test_a_table_fits_80_columns_and_cuts_nothing() -> None:
    rows = table(
        case("none", [1.2345] * 3, wire_bytes=4e6),
        *(case(name, [1.5, 2.5, 18.5], relative_error=1.999, wire_bytes=9.9) for name in SCHEMES),
        case("noop", [1.0] * 3, wire_bytes=0, relative_error=math.nan, ranks_agree=False),
    )
    text = text_of(printed(rows, GIGABIT, world_size=2))
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
    assert all(name in text for name in SCHEMES)
    assert len(SHOWN) + 1 <= 10


def test_how_to_read_the_tables_fits_80_columns() -> None:
    assert max(map(len, HOW_TO_READ.splitlines())) <= 80


def test_a_computed_table_says_so() -> None:
    rows = table(case("none", [1.0] * 3), how="computed")
    assert "computed from bytes" in text_of(printed(rows, GIGABIT, world_size=2))
    assert set(rows["how"]) == {"computed"}


def test_times_are_compared_turn_by_turn() -> None:
    # The machine was three times slower in the second turn: that is in no ratio.
    rows = table(case("none", [1.0, 3.0, 1.0]), case("int4", [0.5, 1.5, 0.5])).set_index("scheme")
    assert rows.loc["int4", ["over_none_q1", "over_none", "over_none_q3"]].tolist() == [0.5] * 3


@pytest.mark.parametrize(
    ("turns", "pays"),
    [([0.8, 0.9, 0.7], "yes"), ([1.3, 1.2, 1.1], "no"), ([0.8, 1.0, 1.3], "even")],
)
def test_a_scheme_pays_only_beyond_what_turns_differ_by(turns: list[float], pays: str) -> None:
    rows = table(case("none", [1.0] * 3), case("int4", turns)).set_index("scheme")
    assert rows.loc["int4", "pays"] == pays


def test_bytes_saved_are_those_of_a_dense_all_reduce() -> None:
    assert table(case("int4", [1.0]))["saved"].tolist() == [0.75]


def test_a_link_adds_what_backward_does_not_hide() -> None:
    # 4 MB at 1 Gbit/s are 32 ms, of which backward hides 10.
    (seconds,) = computed([0.02], wire_nbytes=4e6, rate=1e9, window_s=0.01, buckets=4)
    assert seconds == pytest.approx(0.02 + 0.022)


def test_the_last_bucket_is_never_hidden() -> None:
    (seconds,) = computed([0.02], wire_nbytes=4e6, rate=1e9, window_s=0.5, buckets=4)
    assert seconds == pytest.approx(0.02 + 0.008)


def test_nothing_sent_costs_nothing_on_any_link() -> None:
    assert computed([0.02], wire_nbytes=0, rate=1e6, window_s=0.0, buckets=4) == [0.02]


def test_only_limited_links_are_computed() -> None:
    cases = [case("none", [0.02])]
    assert computed_cases(parse("unlimited"), cases, bucket_cap_mb=1.0) == cases
    (results,) = computed_cases(GIGABIT, cases, bucket_cap_mb=1.0)
    assert results["block_s"] == [pytest.approx(0.02 + 0.008 - 0.004)]


def test_a_gradient_of_a_little_more_than_a_bucket_takes_two() -> None:
    assert [bucket_count(nbytes, 1.0) for nbytes in (2**20, 2**20 + 4)] == [1, 2]


@pytest.mark.parametrize(
    ("text", "name", "rate"),
    [
        ("unlimited", "unlimited", None),
        ("1gbit", "1 Gbit/s", 1e9),
        ("100mbit", "100 Mbit/s", 1e8),
        ("2.5gbit", "2.5 Gbit/s", 2.5e9),
    ],
)
def test_links_by_name(text: str, name: str, rate: float | None) -> None:
    assert (parse(text).name, parse(text).rate) == (name, rate)


@pytest.mark.parametrize("text", ["", "fast", "0gbit", "-1gbit", "1 Gbit/s", "1gb"])
def test_other_links_are_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="100mbit"):
        parse(text)


def test_on_a_link_nothing_is_watched_and_no_step_is_dense() -> None:
    usual = Settings("characters", list(SCHEMES))
    here = settings_on(parse("100mbit"), usual, ["none", "dgc 1 %"], nbytes=3e6)
    assert (here.measures_error, here.hooks) == (False, ["none", "dgc 1 %"])
    options = SCHEMES["dgc 1 %"].options_with(here.dense_steps)
    assert options["warmup_steps"] == 1 < here.untimed


def test_every_registered_scheme_is_in_the_study() -> None:
    every = {*BUILT_IN, *BASELINES} - {"allreduce"}  # another name of "none"
    assert {entry.scheme for entry in SCHEMES.values() if entry.scheme} == every
    assert set(ON_LINKS) <= set(SCHEMES)
    assert not set(SCHEMES) & set(VARIANTS)


@pytest.mark.parametrize(
    ("scheme", "expected"),
    [("none", True), ("int8", True), ("topk", True), ("powersgd", True), ("signsgd", False),
     ("onebit_adam", False), ("demo", False), ("dgc", False), ("gossip", False), ("noop", False)],
)  # fmt: skip
def test_only_averages_have_an_error(scheme: str, expected: bool) -> None:
    assert gives_mean(commhooks.HookState(scheme)) is expected


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def error_over_a_run(scheme: str, steps: int = 40, **options: Any) -> float:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Linear(64, 32))
    hook = commhooks.register(ddp, scheme, **options)
    watch = GradientError(ddp.parameters(), bucket_nbytes=64)
    for step in range(steps):
        ddp.zero_grad()
        inputs = torch.randn(8, 64, generator=torch.Generator().manual_seed(step)) + 1
        ddp(inputs).square().sum().backward()
        watch.step()
    watch.close()
    hook.close()
    assert watch.window() >= 0
    return watch.error()


@pytest.mark.usefixtures("alone")
def test_over_a_run_an_exact_scheme_has_no_error() -> None:
    assert error_over_a_run("none") < 1e-6  # float32 sums


@pytest.mark.usefixtures("alone")
def test_over_a_run_feedback_delivers_what_a_step_leaves_out() -> None:
    with_feedback = error_over_a_run("topk", ratio=0.1)
    without = error_over_a_run("topk", ratio=0.1, error_feedback=False)
    # A tenth of the entries per step, and gradients that point the same way in every step: without
    # feedback most entries never arrive; with it they come some steps late.
    assert with_feedback < 0.2
    assert without > 0.4


@pytest.mark.usefixtures("alone")
def test_over_a_run_a_scheme_that_sends_a_share_is_wrong_by_the_rest() -> None:
    # Nothing is averaged on one rank, so that only what is left out counts.
    assert error_over_a_run("random_k", ratio=0.5, error_feedback=False) > 0.3


def test_a_verdict_names_the_fastest_and_the_fastest_that_is_near_exact() -> None:
    rows = table(
        case(NO_HOOK, [0.9] * 3),
        case("none", [1.0] * 3),
        case("topk 1 %", [0.2] * 3, relative_error=0.6),
        case("int4", [0.3] * 3, relative_error=0.01),
        case("noop", [0.1] * 3, relative_error=math.nan),
    )
    text = verdict(GIGABIT, rows)
    assert text.startswith("At 1 Gbit/s a step without compression takes 1000 ms, and 100 ms if")
    assert "all schemes: topk 1 % is the fastest and takes 0.20 of the time of none" in text
    assert text.endswith("up to 5 % it is int4, with 0.30.")


def test_a_verdict_where_nothing_pays() -> None:
    rows = table(case("none", [1.0] * 3), case("int4", [1.1] * 3), case("int8", [1.2] * 3))
    text = verdict(parse("unlimited"), rows)
    assert "Nothing pays: the fastest scheme, int4, takes 1.10 of the time of none" in text


def test_a_verdict_on_a_computed_link_says_so() -> None:
    rows = table(case("none", [1.0] * 3), case("int4", [0.5] * 3), how="computed")
    assert verdict(GIGABIT, rows).startswith("At 1 Gbit/s, as computed from bytes, a step")


def test_a_verdict_without_a_base_says_that() -> None:
    assert "was not run" in verdict(GIGABIT, table(case("int4", [1.0])))


def test_the_picture_of_the_readme_has_both_links_and_both_ends() -> None:
    rows = [case("none", [1.0]), case("int4", [0.5]), case("noop", [0.2]), case("demo", [3.0])]
    both = [compared(link, "measured", rows, rows) for link in (parse("unlimited"), GIGABIT)]
    chosen = when_it_pays(pd.concat(both))
    assert chosen.index.tolist() == ["none", "int4", "noop"]
    assert chosen.columns.tolist() == ["1 Gbit/s", "unlimited"]


def choose(
    monkeypatch: pytest.MonkeyPatch, failing: set[str], *, is_root: bool
) -> namespaces.Access:
    monkeypatch.setattr(namespaces.sys, "platform", "linux")
    monkeypatch.setattr(namespaces.shutil, "which", lambda name, path: f"/sbin/{name}")
    return namespaces.choose(
        lambda way: "not permitted" if way.kind in failing else None, is_root=is_root
    )


@pytest.mark.parametrize(
    ("is_root", "failing", "kind"),
    [
        (True, set(), "root"),
        (True, {"root"}, "user"),
        (False, set(), "user"),
        (False, {"root"}, "user"),
        (False, {"user"}, "none"),
        (True, {"root", "user"}, "none"),
    ],
)
def test_the_first_way_that_works_is_taken(
    monkeypatch: pytest.MonkeyPatch, is_root: bool, failing: set[str], kind: str
) -> None:
    way = choose(monkeypatch, failing, is_root=is_root)
    assert way.kind == kind
    assert kind != "none" or "user namespaces: not permitted" in way.words


def test_a_user_namespace_is_entered_only_where_there_is_one() -> None:
    assert namespaces.AS_ROOT.unshare == namespaces.AS_ROOT.enter == []
    assert "--user" in namespaces.AS_USER.unshare
    assert "--user" in namespaces.AS_USER.enter


def test_without_the_commands_links_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces.sys, "platform", "linux")
    monkeypatch.setattr(namespaces.shutil, "which", lambda name, path: None)
    way = namespaces.choose(lambda way: None, is_root=True)
    assert way.kind == "none"
    assert "iproute2" in how_made(way)
    assert "computed from bytes" in how_made(way)


def test_on_other_systems_links_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces.sys, "platform", "darwin")
    assert "need Linux" in how_made(namespaces.choose(lambda way: None, is_root=True))


def test_how_links_are_made_is_said() -> None:
    assert "without root" in how_made(namespaces.AS_USER)
    assert "as root" in how_made(namespaces.AS_ROOT)
    assert "as asked" in how_made(namespaces.AS_ROOT, wanted=False)


@pytest.mark.parametrize(
    ("rate", "burst"), [("1gbit", 125_000), ("10gbit", 1_250_000), ("100mbit", 32768)]
)
def test_a_line_lets_a_millisecond_pass_at_once(rate: str, burst: int) -> None:
    assert namespaces.burst_nbytes(rate) == burst


def test_a_rate_in_other_units_is_an_error() -> None:
    with pytest.raises(ValueError, match="100mbit"):
        namespaces.burst_nbytes("1 Gbit/s")
