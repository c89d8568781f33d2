"""The page of the network study: which hooks have a known error, and what is on the front."""

from __future__ import annotations

import math
from pathlib import Path

import pandas as pd
import pytest

from commhooks import make
from commhooks.predict._quality import Gap
from experiments.network import rates
from experiments.network.front import exchange_errors, fronts
from experiments.network.page import is_judged, ratios_of_links
from experiments.network.rates import drawn_by_rate, has_rates
from experiments.network.setups import CHOICE, Setup, setup_of
from experiments.tools.models import MODELS

RESULTS = Path(__file__).parents[2] / "docs" / "results" / "network"
PAGE = " ".join((RESULTS / "README.md").read_text().split())


def _table() -> pd.DataFrame:
    hooks = {
        "none": 50.0,
        "bf16": 30.0,
        "int8": 40.0,
        "topk": 10.0,
        "torch none": 55.0,
        "auto": 9.0,
    }
    rows = [
        ("tiny layers", f"tiny layers, {rate}", *hook) for rate in "ab" for hook in hooks.items()
    ]
    table = pd.DataFrame(rows, columns=["model", "cell", "hook_name", "step_ms"])
    table["exchange_error"] = exchange_errors(table)
    return table


def test_errors_are_those_of_hooks_whose_arithmetic_is_known() -> None:
    errors = _table().set_index("hook_name").exchange_error[:6]
    assert errors["none"] == 0
    assert 0 < errors["bf16"] < errors["int8"] < errors["topk"] < 1
    assert math.isnan(errors["torch none"])
    assert math.isnan(errors["auto"])


def test_a_hook_that_another_one_beats_in_both_is_not_on_the_front() -> None:
    ((model, figure),) = fronts(_table())
    assert model == "tiny layers"
    first, second, empty = figure.axes
    assert first.get_title() == "a"
    (front,) = (line for line in second.lines if line.get_drawstyle() == "steps-post")
    assert list(front.get_xdata()) == [10.0, 30.0, 50.0]  # int8 is slower than bf16, and less exact
    assert not empty.axison


def test_ratios_name_the_fastest_fixed_hook_and_compare_auto_with_it_and_its_choice() -> None:
    over = {"noop": 1.0, "one value": 1.1, "none": 12.345, "int8": 2.0, "topk on torch": 1.5}
    over |= {"auto": 1.8, CHOICE: 2.4}
    rows = [
        {"model": "words", "hosts": 2, "mbit": rate, "delay_ms": 0.0, "scheme": name}
        | {"over_noop": ratio, "standard_error": 0.03 * ratio}
        for rate in (200.0, 0.0)
        for name, ratio in over.items()
    ]
    head, rule, first, second = ratios_of_links(pd.DataFrame(rows)).splitlines()
    assert head.count("|") == rule.count("|") == first.count("|")
    link, ratios = "| words, 2 hosts, 200 Mbit/s |", " 1.10 | 12.3 | 2.00 | 1.50 | 1.80 |"
    assert first == f"{link}{ratios} int8 | 0.90 ± 0.04 | 0.75 |"
    assert second.startswith("| words, 2 hosts, no limit |")


@pytest.mark.parametrize(
    ("text", "setup"),
    [
        ("topk", Setup("topk", False, None, False)),
        ("one value", Setup("one value", False, None, False)),
        ("bf16 in 1.5 MiB", Setup("bf16", False, 1.5, False)),
        ("noop on torch", Setup("noop", True, 1000.0, False)),
        (
            'acpsgd:rank=4,wire_dtype="bf16" on torch in 2 MiB by copies',
            Setup('acpsgd:rank=4,wire_dtype="bf16"', True, 2.0, True),
        ),
    ],
)
def test_a_setup_is_a_scheme_a_class_and_its_buckets(text: str, setup: Setup) -> None:
    assert setup_of(text) == setup


@pytest.mark.parametrize("text", ["", "topk by copies", "topk in 2 MiB by copies", "topk in 0 MiB"])
def test_a_setup_that_means_nothing_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no setup"):
        setup_of(text)


def test_predictions_that_begin_with_what_was_measured_do_not_count() -> None:
    names = ["noop", "noop on torch", "one value", CHOICE, "none", "torch none", "topk on torch"]
    assert [name for name in names if is_judged(name)] == ["none", "torch none", "topk on torch"]


def test_lines_by_rate_are_solid_where_the_loss_of_bf16_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    proved = Gap("int8", {}, -0.1, 0.1, 30, 30)
    monkeypatch.setattr(rates, "gap_of", lambda scheme: {make("int8"): proved}.get(scheme))
    hooks = {
        "noop": 30.0,
        "one value": 31.0,
        "none": 900.0,
        "int8": 300.0,
        "topk": 60.0,
        "torch powersgd": 80.0,
    }
    rows = [
        {"model": "words", "mbit": rate, "delay_ms": 0.0, "scheme": name, "step_ms": ms + rate}
        | {"over_noop": ms / 30, "standard_error": 0.01}
        for rate in (50.0, 200.0, 500.0, 1000.0, 10000.0, 0.0)
        for name, ms in {**hooks, "torch none": 600.0}.items()
    ]
    table = pd.DataFrame(rows)
    assert has_rates(table)
    assert not has_rates(table[table.mbit > 100])
    left, right = drawn_by_rate(table).axes
    assert left.get_title(loc="left").startswith(
        "words: a transformer with 14 M parameters; dashed"
    )
    assert {line.get_label(): line[0].get_linestyle() for line in left.containers} == {
        "no communication": ":", "none": "-", "int8": "-", "topk": "--", "torch none": "-",
        "torch powersgd 2, repaired": "--",
    }  # fmt: skip
    assert [tick.get_text() for tick in left.get_xticklabels()] == [
        "50 Mbit/s", "200 Mbit/s", "500 Mbit/s", "1 Gbit/s", "10 Gbit/s", "no limit",
    ]  # fmt: skip
    ratios = {line.get_label(): line[0].get_ydata()[0] for line in right.containers}
    assert ratios["int8"] == pytest.approx(0.5)  # over torch's class without a hook
    assert "torch none" not in ratios


@pytest.mark.parametrize("model", MODELS)
def test_every_setup_of_the_study_is_drawn_without_torch_too(model: str) -> None:
    names = ["noop", "one value", "auto", CHOICE, "eden:bits=2", "topk on torch in 25 MiB"]
    rows = [
        {"model": model, "mbit": rate, "delay_ms": 0.0, "scheme": name, "step_ms": 30.0}
        | {"over_noop": 1.0, "standard_error": 0.01}
        for rate in (50.0, 200.0, 500.0, 1000.0, 10000.0, 0.0)
        for name in names
    ]
    for panel in drawn_by_rate(pd.DataFrame(rows)).axes:
        assert len(panel.containers) == len(names) - 1


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("words", "standard errors: {} % in the"),
        ("near_limit", "errors are {} % of a ratio in the"),
    ],
)
def test_standard_errors_of_the_page_are_those_of_the_table(name: str, text: str) -> None:
    table = pd.read_csv(RESULTS / f"{name}.csv")
    table = table[table.scheme != "noop"]  # which is compared with itself
    errors = 100 * table.standard_error / table.over_noop
    assert f"{text.format(f'{errors.median():.1f}')} median, at most {errors.max():.1f} %" in PAGE


def test_plans_of_the_page_near_the_limit_are_those_of_the_table() -> None:
    table = pd.read_csv(RESULTS / "near_limit.csv")
    table = table[(table.mbit == 1000) & table.scheme.str.startswith("acpsgd:rank=8")]
    above = 100 * (table[table.model != "tiny layers"].over_noop - 1)
    assert f"is {above.min():.0f} to {above.max():.0f} % above a step that sends nothing" in PAGE


def test_the_page_names_every_prediction_that_is_far_off() -> None:
    table = pd.read_csv(RESULTS / "network.csv")
    errors = table[table.scheme.map(is_judged)].error.dropna().abs()
    far = table.loc[errors.index[errors > 0.2]]
    words = {2: "Two", 3: "Three"}[len(far)]
    assert f"{100 * (errors <= 0.2).mean():.0f} % within 20 %." in PAGE
    _, _, rest = PAGE.partition(f"{words} are further off, all for tiny layers:")
    sentence = rest.partition(". ")[0]
    assert set(far.model) == {"tiny layers"}
    for row in far.itertuples():
        error = row.step_ms * row.standard_error / row.over_noop
        assert f"{row.step_ms:.0f} ± {error:.0f}" in sentence
        assert f"{row.predicted_ms:.0f}" in sentence
