"""Draws steps by the rate of the link: where to compress, and where not."""

from __future__ import annotations

from typing import Any

import matplotlib as mpl
import pandas as pd
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from commhooks.predict._quality import gap_of
from commhooks.report._style import GREY, OKABE_ITO
from experiments.network.front import made
from experiments.network.page import short_name
from experiments.network.setups import CHOICE, setup_of
from experiments.tools.models import MODELS

__all__ = ["drawn_by_rate", "has_rates"]

_LEAST = 6  # rates that make a picture
_FLOOR = "noop"
_TORCH = "torch none"
_FAST_MBIT = 500.0
_NO_HOOKS = (_FLOOR, "one value")
# Each in a colour of its own, whatever a table has: a hook of torch looks like ours.
_FAMILIES = ("none", "bf16", "int8", "int4", "powersgd", "acpsgd", "topk")
_LABELS = {_FLOOR: "no communication", "torch powersgd": "torch powersgd 2, repaired"}
_KINDS = {
    "resnet": "ResNet-18",
    "transformer": "a transformer",
    "words": "a transformer",
    "tiny layers": "a chain of narrow layers",
}
_EXACT = ("none", "torch none", "bf16", "torch fp16")  # what others are compared with


def has_rates(table: pd.DataFrame) -> bool:
    """Whether a table has enough rates of a model, without further delays."""
    return bool(table[table.delay_ms == 0].groupby("model").mbit.nunique().max() >= _LEAST)


def drawn_by_rate(table: pd.DataFrame) -> Figure:
    """Returns a picture of the steps of each hook by the rate of the link, for each model.

    On the left their time; on the right, for fast links, over that of torch's class without a hook,
    with standard errors: above 1 compression costs time. The line of a hook is solid if the study
    of quality proved that it keeps the loss of bf16, and dashed otherwise.

    Args:
        table: rows of the study; a rate of 0 is no limit.
    """
    mpl.use("agg")
    table = table[table.delay_ms == 0]
    models = [name for name, rows in table.groupby("model") if rows.mbit.nunique() >= _LEAST]
    figure = Figure(figsize=(11, 0.7 + 4.3 * len(models)), layout="constrained")
    panels = figure.subplots(len(models), 2, squeeze=False)
    for (left, right), model in zip(panels, models, strict=True):
        rows = table[table.model == model]
        _draw(left, rows)
        left.set_yscale("log")
        left.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        left.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        left.yaxis.set_minor_formatter(NullFormatter())
        left.set(ylabel="step [ms]")
        title = f"{_named(str(model))}; dashed: not proved to keep bf16's loss"
        left.set_title(title, fontsize=9, loc="left")
        _draw(right, _over_torch(rows[(rows.mbit >= _FAST_MBIT) | (rows.mbit == 0)]))
        right.axhline(1, color=GREY, linewidth=0.8)
        right.set(ylabel="step over that of torch without a hook")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, fontsize=8)
    return figure


def _named(name: str) -> str:
    """Returns a model's name with what it is, and its size."""
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in MODELS[name].build().parameters())
    return f"{name}: {_KINDS[name]} with {parameters / 1e6:.0f} M parameters"


def _over_torch(rows: pd.DataFrame) -> pd.DataFrame:
    """Returns rows with ratios in place of times: "step_ms" and its standard error, "error_ms"."""
    of_torch = rows[rows.scheme == _TORCH].set_index("mbit")
    over = rows.mbit.map(of_torch.over_noop)
    share = rows.standard_error / rows.over_noop
    share_of_torch = rows.mbit.map(of_torch.standard_error / of_torch.over_noop)
    ratio = rows.over_noop / over
    errors = ratio * (share**2 + share_of_torch**2) ** 0.5
    return rows.assign(step_ms=ratio, error_ms=errors)[rows.scheme != _TORCH]


def _draw(panel: Any, rows: pd.DataFrame) -> None:
    rates = sorted(rate for rate in rows.mbit.unique() if rate)
    places = {rate: place for place, rate in enumerate([*rates, 0.0])}
    hooks = [name for name in rows.scheme.unique() if name not in _NO_HOOKS]
    families = list(dict.fromkeys([*_FAMILIES, *map(_family, hooks)]))
    for index, name in enumerate((_FLOOR, *hooks)):
        steps = rows[rows.scheme == name].assign(place=lambda t: t.mbit.map(places))
        steps = steps.sort_values("place")
        looks: dict[str, Any] = {"color": GREY, "linestyle": ":"}
        if name != _FLOOR:
            family = families.index(_family(name))
            looks = {
                "color": OKABE_ITO[family % len(OKABE_ITO)],
                "linestyle": "-" if _keeps_quality(name) else "--",
                "marker": "osD^vP*"[family % 7],
                "markerfacecolor": "white" if name.startswith("torch ") else None,
            }
        errors = steps.get("error_ms")
        # Beside each other, so that errors at a rate can be told apart.
        aside = 0 if errors is None else 0.02 * (index - len(hooks) / 2)
        label = _LABELS.get(name, short_name(name))
        panel.errorbar(
            steps.place + aside, steps.step_ms, errors, label=label, markersize=4, elinewidth=0.7,
            **looks,
        )  # fmt: skip
    panel.set_xticks(list(places.values()), [_rate(rate) for rate in places], fontsize=8)
    panel.grid(axis="y", color="0.9")
    panel.set(xlabel="rate of the link")


def _family(name: str) -> str:
    return name.removeprefix("torch ").replace("fp16", "bf16").partition(":")[0]


def _keeps_quality(name: str) -> bool:
    if name in _EXACT:
        return True
    # Warm-up and rank of torch's are others than those of the study; auto's scheme is any.
    if name.startswith("torch ") or name in ("auto", CHOICE):
        return False
    gap = gap_of(made(setup_of(name).scheme))
    return gap is not None and gap.is_proved


def _rate(mbit: float) -> str:
    if not mbit:
        return "no limit"
    return f"{mbit:g} Mbit/s" if mbit < 1000 else f"{mbit / 1000:g} Gbit/s"
