"""Figures in the README, and in the short table of results, are those that the studies wrote."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"
README = (ROOT / "README.md").read_text()
SHORT = (RESULTS / "README.md").read_text().partition("## In short")[2].partition("\n## ")[0]
MODELS = ("resnet", "transformer", "tiny layers")


def written(text: str) -> list[str]:
    """The figures in the row of the short table that begins with ``text``."""
    (row,) = re.findall(rf"^\| {re.escape(text)}.*? \| (.*) \|$", SHORT, flags=re.MULTILINE)
    return re.findall(r"\d+(?:\.\d+)?", re.sub(r"AVX\S*|\(ResNet.*", "", row))


def hook_cost(hook: str, digits: int) -> list[str]:
    table = pd.read_csv(RESULTS / "step_cost" / "hooks.csv").set_index(["hook", "model"]).step_ratio
    return [f"{table[hook, model]:.{digits}f}" for model in MODELS]


def reducer_cost(link: str) -> list[str]:
    table = pd.read_csv(RESULTS / "step_cost" / "reducer.csv")
    ours = table[table.case == "ours"].set_index(["link", "model"]).ratio
    return [f"{ours[link, model]:.3f}" for model in MODELS]


def wire_bytes() -> list[str]:
    larger = pd.read_csv(RESULTS / "wire_bytes.csv").groupby("hook").ratio.max()
    return [f"{larger[hook]:.3f}" for hook in ("allreduce", "fp16", "PowerSGD 4")]


def scheme_cost() -> pd.DataFrame:
    return pd.read_csv(RESULTS / "step_cost" / "schemes.csv")


def over_bf16() -> list[str]:
    ratios = scheme_cost().set_index(["scheme", "rate"])["over bf16"]
    schemes = ("int8", "int4", "powersgd, rank 4")
    return [f"{ratios[scheme, rate]:.2f}" for scheme in schemes for rate in ("100mbit", "1gbit")]


def int8_kernel() -> list[str]:
    v4, v3 = (
        pd.read_csv(RESULTS / "cpu_kernels" / f"{which}.csv").set_index(["op", "way"]).ratio
        for which in ("v4", "v3")
    )
    op = "int8 encode, feedback"
    return [
        f"{v4[op, 'kernel']:.2f}", f"{v3[op, 'kernel']:.2f}", f"{v4[op, 'definition']:.0f}"
    ]  # fmt: skip


ROWS: dict[str, Callable[[], list[str]]] = {
    "step time, our allreduce hook": lambda: hook_cost("allreduce", 3),
    "step time, our PowerSGD": lambda: hook_cost("PowerSGD 4, one bucket", 2),
    "step time, our `Dist": lambda: reducer_cost("unlimited"),
    "the same at 1 Gbit/s": lambda: reducer_cost("1 Gbit/s"),
    "bytes an interface sent": wire_bytes,
    "step time over bf16's": over_bf16,
    "int8 quantisation": int8_kernel,
}


@pytest.mark.parametrize("text", ROWS)
def test_a_row_is_that_of_the_table_of_the_study(text: str) -> None:
    assert written(text) == ROWS[text]()


def test_every_row_has_a_table() -> None:
    firsts = re.findall(r"^\| (\w.*?) \|", SHORT, flags=re.MULTILINE)
    assert len(firsts) == len(ROWS)
    assert all(any(first.startswith(text) for text in ROWS) for first in firsts)


def test_the_readme_is_a_screen_or_two() -> None:
    lines = README.splitlines()
    assert len(lines) <= 80
    assert max(map(len, lines)) <= 120


def test_figures_below_the_picture_are_those_of_both_tables() -> None:
    # Of all digits: 1.0251 would be 1.025 with three, and then 1.02.
    steps = pd.read_csv(RESULTS / "network" / "words.csv").set_index(["mbit", "scheme"]).step_ms
    expected = [steps[rate, "int8"] / steps[rate, "torch none"] for rate in (500, 1000, 0)]
    study = pd.read_csv(RESULTS / "bandwidth" / "bandwidth.csv").set_index(["link", "scheme"])
    links, schemes = ("1 Gbit/s", "unlimited"), ("fp16", "powersgd, rank 4")
    expected += [study.over_none[link, scheme] for link in links for scheme in schemes]
    expected.append(study.over_none["unlimited", "(no hook)"])
    below = README.partition("words_by_rate.png)")[2].partition("\n## ")[0]
    stated = re.findall(r"\d\.\d\d\b", below)
    assert stated == [f"{ratio:.2f}" for ratio in expected]
