"""The page of the network study: which hooks have a known error, and what is on the front."""

from __future__ import annotations

import math

import pandas as pd

from experiments.network_front import exchange_errors, fronts
from experiments.network_page import CHOICE, auto_ratios

_CHOICE = {"model": "tiny layers", "cell": "tiny layers, a", "hook_name": CHOICE, "step_ms": 12.0}


def _table() -> pd.DataFrame:
    hooks = {
        "none": 50.0,
        "bf16": 30.0,
        "int8": 40.0,
        "topk": 10.0,
        "torch none": 55.0,
        "auto": 9.0,
    }
    rows = [("tiny layers", f"tiny layers, {rate}", *one) for rate in "ab" for one in hooks.items()]
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


def test_auto_is_compared_with_the_fastest_fixed_hook_and_with_its_own_choice() -> None:
    ((_, fastest, choice), (_, _, none)) = auto_ratios(
        pd.concat([_table(), pd.DataFrame([_CHOICE])], ignore_index=True)
    )
    assert (fastest, choice) == (0.9, 0.75)  # topk takes 10, and the choice 12
    assert math.isnan(none)
