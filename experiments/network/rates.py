"""Draws what a step takes by the rate of the link: where to compress, and where not."""

from __future__ import annotations

from typing import Any

import matplotlib as mpl
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from commhooks.predict._quality import gap_of
from commhooks.report._style import GREY, OKABE_ITO
from experiments.network.front import made
from experiments.network.page import short_name
from experiments.network.setups import setup_of

__all__ = ["drawn_by_rate", "has_rates"]

_LEAST = 6  # rates that make a picture
_FLOOR = "noop"
_NO_HOOKS = (_FLOOR, "one value")
_LABELS = {_FLOOR: "no communication", "torch powersgd": "torch powersgd 2, repaired"}
_EXACT = ("none", "torch none", "bf16", "torch fp16")  # what others are compared with


def has_rates(table: pd.DataFrame) -> bool:
    """Whether a table has enough rates of a model, without further delays."""
    return bool(table[table.delay_ms == 0].groupby("model").mbit.nunique().max() >= _LEAST)


def drawn_by_rate(table: pd.DataFrame) -> Figure:
    """Returns a picture of the step time of each hook by the rate of the link, for each model.

    The line of a hook is solid if the study of quality proved that it keeps the loss of bf16, and
    dashed otherwise. At a rate at which no line is below that of "none", compression costs time.

    Args:
        table: rows of the study; a rate of 0 is no limit.
    """
    mpl.use("agg")
    table = table[table.delay_ms == 0]
    models = [name for name, rows in table.groupby("model") if rows.mbit.nunique() >= _LEAST]
    figure = Figure(figsize=(8.5, 0.6 + 4.6 * len(models)), layout="constrained")
    panels = figure.subplots(len(models), 1, squeeze=False)[:, 0]
    for panel, model in zip(panels, models, strict=True):
        _draw(panel, table[table.model == model])
        panel.set_title(f"{model}; dashed: not proved to keep bf16's loss", fontsize=9, loc="left")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, fontsize=8)
    return figure


def _draw(panel: Any, rows: pd.DataFrame) -> None:
    rates = sorted(rate for rate in rows.mbit.unique() if rate)
    places = {rate: place for place, rate in enumerate([*rates, 0.0])}
    hooks = [name for name in rows.scheme.unique() if name not in _NO_HOOKS]
    families = list(dict.fromkeys(map(_family, hooks)))  # a hook of torch looks like ours
    for name in (_FLOOR, *hooks):
        steps = rows[rows.scheme == name].assign(place=lambda t: t.mbit.map(places))
        steps = steps.sort_values("place")
        looks: dict[str, Any] = {"color": GREY, "linestyle": ":"}
        if name != _FLOOR:
            index = families.index(_family(name))
            looks = {
                "color": OKABE_ITO[index % len(OKABE_ITO)],
                "linestyle": "-" if _keeps_quality(name) else "--",
                "marker": "osD^vP*"[index % 7],
                "markerfacecolor": "white" if name.startswith("torch ") else None,
            }
        label = _LABELS.get(name, short_name(name))
        panel.plot(steps.place, steps.step_ms, label=label, markersize=4, **looks)
    panel.set_yscale("log")
    panel.set_xticks(list(places.values()), [_rate(rate) for rate in places])
    panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    panel.yaxis.set_minor_formatter(NullFormatter())
    panel.grid(axis="y", color="0.9")
    panel.set(xlabel="rate of the link", ylabel="step [ms]")


def _family(name: str) -> str:
    return name.removeprefix("torch ").replace("fp16", "bf16").partition(":")[0]


def _keeps_quality(name: str) -> bool:
    if name in _EXACT:
        return True
    if name.startswith("torch "):  # its warm-up and rank are others than those of the study
        return False
    gap = gap_of(made(setup_of(name).scheme))
    return gap is not None and gap.is_proved


def _rate(mbit: float) -> str:
    if not mbit:
        return "no limit"
    return f"{mbit:g} Mbit/s" if mbit < 1000 else f"{mbit / 1000:g} Gbit/s"
