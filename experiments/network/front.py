"""Draws step times of the network study against the error of one exchange: the front of both."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from functools import cache
from itertools import cycle
from typing import Any

import pandas as pd
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter
from torch import Tensor

import commhooks
from commhooks.predict._advise import error_of
from commhooks.report._style import GREY, OKABE_ITO
from experiments.network.setups import CHOICE, setup_of
from experiments.tools.models import MODELS

__all__ = ["ABOUT", "exchange_errors", "fronts", "made"]

ABOUT = (
    "Steps take less time on the left, and exchanges have a smaller error below; no hook is better "
    "in both than those on the line. The error is that of one exchange: the squared norm of the "
    "mean of two ranks minus the dense mean, over that of the dense mean, for the gradients of the "
    "model's first step, without feedback. With feedback later steps send it, so that it says what "
    "comes late, not what is lost; losses are in another study (Quality against bytes). The error "
    "of torch's hooks is not computed here, and that of auto changes with its choice: the dotted "
    "line is its step time. The front of error against bits is drawn by commhooks tradeoff."
)
_EXACT = 1e-9  # where an error of zero is drawn
_COLUMNS = 3


def made(text: str) -> commhooks.Scheme:
    """Returns a scheme from a name with options, such as "powersgd:rank=2".

    Raises:
        ValueError: the options cannot be read, or the scheme refuses them.
    """
    name, _, options = text.partition(":")
    pairs = (option.split("=") for option in options.split(",") if option)
    try:
        values = {key: json.loads(value) for key, value in pairs}
    except ValueError:
        raise ValueError(
            f"options follow a name as in 'acpsgd:rank=2,wire_dtype=\"bf16\"', with values as in "
            f"JSON, got {options!r}"
        ) from None
    return commhooks.make(name, **values)


def exchange_errors(table: pd.DataFrame) -> list[float]:
    """Returns the error of an exchange for each row's hook; NaN if it is unknown.

    Args:
        table: with names of models, and in ``hook_name`` those of schemes with options.
    """
    rows = zip(table.model, table.hook_name, strict=True)
    return [_error(str(model), str(scheme)) for model, scheme in rows]


@cache
def _error(model: str, scheme: str) -> float:
    if scheme in ("auto", CHOICE, "one value") or scheme.startswith("torch "):
        return math.nan
    built = made(setup_of(scheme).scheme)
    return error_of(built, _gradients(model)) if built.traits.averages else math.nan


@cache
def _gradients(name: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = MODELS[name]
    network = model.build()
    network(model.make_input(model.batch)).float().square().mean().backward()
    return {
        key: parameter.grad
        for key, parameter in network.named_parameters()
        if parameter.grad is not None
    }


def fronts(table: pd.DataFrame) -> Iterator[tuple[str, Figure]]:
    """Yields a picture for each model, with a plot for each cell of the study.

    Args:
        table: with the columns "cell" and "exchange_error".
    """
    known = table[table.exchange_error.notna()]
    names = list(dict.fromkeys(known.hook_name))
    styles = dict(zip(names, cycle(zip(OKABE_ITO, "osD^vP*", strict=True)), strict=False))
    for model, rows in table.groupby("model", sort=False):
        cells = list(rows.groupby("cell", sort=False))
        lines = math.ceil(len(cells) / _COLUMNS)
        figure = Figure(figsize=(11, 0.8 + 2.7 * lines), layout="constrained")
        axes = list(figure.subplots(lines, _COLUMNS, sharey=True, squeeze=False).flat)
        for axis, (cell, some) in zip(axes, cells, strict=False):
            _front(axis, some, styles)
            axis.set_title(str(cell).removeprefix(f"{model}, "), fontsize=9)
        for axis in axes[len(cells) :]:
            axis.axis("off")
        for axis in axes[::_COLUMNS]:
            axis.set_ylabel("error of an exchange\n(squared, relative)", fontsize=9)
        handles = dict(zip(*reversed(axes[0].get_legend_handles_labels()), strict=True))
        labels = [name for name in (*names, "auto") if name in handles]
        figure.legend(
            [handles[name] for name in labels],
            labels,
            fontsize=8,
            loc="outside lower center",
            ncols=8,
        )
        yield str(model), figure


def _front(axis: Any, rows: pd.DataFrame, styles: dict[str, tuple[str, str]]) -> None:
    known = rows[rows.exchange_error.notna()].sort_values("step_ms")
    errors = known.exchange_error.clip(lower=_EXACT)
    best = errors < errors.cummin().shift(fill_value=math.inf)
    axis.plot(
        known.step_ms[best], errors[best], color=GREY, linewidth=1, drawstyle="steps-post", zorder=1
    )
    for name, step, error in zip(known.hook_name, known.step_ms, errors, strict=True):
        colour, marker = styles[name]
        axis.scatter(step, error, s=30, color=colour, marker=marker, label=name, zorder=2)
    for step in rows[rows.hook_name == "auto"].step_ms:
        axis.axvline(step, color=GREY, linestyle=":", label="auto")
    axis.set_yscale("log")
    if rows.step_ms.max() > 3 * rows.step_ms.min():
        axis.set_xscale("log")
        axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.xaxis.set_minor_formatter(NullFormatter())
    else:
        axis.xaxis.set_major_locator(MaxNLocator(4))
    axis.set_ylim(_EXACT / 4, 4)
    axis.set_yticks([_EXACT, 1e-6, 1e-4, 1e-2, 1], ["0", "1e-6", "1e-4", "0.01", "1"])
    axis.tick_params(labelsize=8)
    axis.set_xlabel("step (ms)", fontsize=9)
