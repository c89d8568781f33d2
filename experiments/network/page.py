"""Draws measured steps beside predicted ones; writes the pages and tables of the network study."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from commhooks.report._page import Page
from commhooks.report._style import OKABE_ITO
from experiments.network.front import ABOUT, exchange_errors, fronts
from experiments.network.setups import CHOICE, setup_of
from experiments.tools.tables import markdown

__all__ = ["is_judged", "plotted", "ratios_of_links", "short_name", "where", "written"]

# What the picture of step times shows, in this order.
SHOWN = ("torch none", "none", "bf16", "int8", "int4", "acpsgd 2 bf16", "topk", "auto")


def short_name(scheme: str) -> str:
    """Returns a scheme with options in short form: "acpsgd 2 bf16"."""
    return (
        scheme.translate(str.maketrans(":,", "  ", '"'))
        .replace("rank=", "")
        .replace("wire_dtype=", "")
    )


def where(row: pd.Series) -> str:
    """Returns a cell of the matrix in words."""
    rate = f"{row.mbit:g} Mbit/s" if row.mbit < 1000 else f"{row.mbit / 1000:g} Gbit/s"
    rate = rate if row.mbit else "no limit"
    delay = f", {row.delay_ms:g} ms" if row.delay_ms else ""
    return f"{row.model}, {row.hosts:g} hosts, {rate}{delay}"


def ratios_of_links(table: pd.DataFrame) -> str:
    """Returns steps over the step without communication, as Markdown: a row for each link.

    With "auto" follow the standard error of its ratio to the fastest fixed hook of ddp_core, which
    is named, and its ratio to its own choice, registered by name.

    Args:
        table: rows of the study.
    """
    names = [name for name in dict.fromkeys(table.scheme) if name not in ("noop", "auto", CHOICE)]
    auto = ["auto", "fastest fixed", "auto over it", "over its choice"]
    head = [
        "model, ranks, link",
        *map(short_name, names),
        *(auto if "auto" in set(table.scheme) else []),
    ]
    rows = []
    for link, some in table.groupby(table.apply(where, axis=1), sort=False):
        over = some.set_index("scheme").over_noop
        cells = [_ratio(over.get(name, math.nan)) for name in names]
        if "auto" in over:
            best = min(filter(_is_fixed, names), key=lambda name: over.get(name, math.inf))
            share = some.set_index("scheme").standard_error / over
            ratio, error = over["auto"] / over[best], math.hypot(share["auto"], share[best])
            of_choice = _ratio(over["auto"] / over.get(CHOICE, math.nan))
            cells += [
                _ratio(over["auto"]),
                short_name(best),
                f"{ratio:.2f} ± {ratio * error:.2f}",
                of_choice,
            ]
        rows.append((link, *cells))
    return markdown(head, rows)


def _ratio(value: float) -> str:
    if math.isnan(value):
        return ""
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}"


def _is_fixed(name: str) -> bool:
    """Whether a name is a fixed hook that trains on our class, in buckets of any size."""
    if name in ("auto", CHOICE, "one value") or name.startswith("torch "):
        return False
    setup = setup_of(name)
    return not setup.on_torch and setup.scheme != "noop"


def is_judged(name: str) -> bool:
    """Whether the prediction of a hook with this name counts.

    Predictions begin with the steps of "noop" and of "one value". That of auto's choice is the one
    of "auto".
    """
    return name not in ("one value", CHOICE) and setup_of(name).scheme != "noop"


def plotted(table: pd.DataFrame) -> Figure:
    """Returns two pictures: predicted over measured, and steps over the no-op step."""
    mpl.use("agg")
    figure = Figure(figsize=(11, 5.2), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.15))
    known = table[table.predicted_ms.notna() & table.judged]
    for colour, (name, rows) in zip(OKABE_ITO, known.groupby("model"), strict=False):
        left.scatter(rows.step_ms, rows.predicted_ms, s=12, color=colour, label=name, zorder=2)
    ends = known[["step_ms", "predicted_ms"]].min().min(), known.step_ms.max()
    low, high = 0.8 * ends[0], 1.25 * ends[1]
    left.plot([low, high], [low, high], color="0.4", linewidth=1)
    near = [0.9 * low, 0.9 * high], [1.1 * low, 1.1 * high]
    left.fill_between([low, high], *near, color="0.92", zorder=0)
    left.loglog()
    for axis in (left.xaxis, left.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())
    left.set(xlabel="measured step [ms]", ylabel="predicted step [ms]", title="grey: within 10 %")
    left.legend(loc="upper left", fontsize=9)
    _over_noop(right, table)
    return figure


def _over_noop(axis: mpl.axes.Axes, table: pd.DataFrame) -> None:
    cells = list(dict.fromkeys(table.cell))
    marks = dict(zip(SHOWN, ("|", "s", "o", "^", "v", "D", "P", "*"), strict=True))
    colours = {**dict(zip(SHOWN, ("0.3", *OKABE_ITO), strict=False)), "auto": "black"}
    for name in SHOWN:
        rows = table[table.hook_name == name]
        axis.scatter(
            rows.over_noop,
            [cells.index(cell) for cell in rows.cell],
            marker=marks[name],
            s=70 if name in ("auto", "torch none") else 28,
            color=colours.get(name, "black"),
            label=name,
            zorder=3 if name == "auto" else 2,
        )
    axis.set_xscale("log")
    axis.axvline(1, color="0.6", linewidth=0.8)
    axis.set_xticks([1, 1.5, 2, 3, 5, 8, 16], ["1", "1.5", "2", "3", "5", "8", "16"])
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.set_yticks(range(len(cells)), cells, fontsize=8)
    axis.invert_yaxis()
    axis.grid(axis="x", color="0.9")
    axis.set(xlabel="step time over that without communication (ratio)")
    axis.figure.legend(
        *axis.get_legend_handles_labels(), fontsize=8, loc="outside lower center", ncols=8
    )


def written(rows: Sequence[dict[str, object]], path: Path, picture: Path) -> None:
    """Writes the page of the study, and its picture as a file of its own."""
    table = pd.DataFrame(rows).rename(columns={"scheme": "hook_name"})
    for name in ("predicted_ms", "error"):
        table[name] = pd.to_numeric(table[name], errors="coerce")
    table["exchange_error"] = exchange_errors(table)
    table["cell"] = table.apply(where, axis=1)
    table["judged"] = table.hook_name.map(is_judged)
    table["hook_name"] = table.hook_name.map(short_name)
    figure = plotted(table)
    figure.savefig(picture, dpi=110)
    page = Page("Training over limited links, measured and predicted")
    judged = table[table.judged]
    page.text(
        f"Median error of a predicted step: {100 * judged.error.abs().median():.1f} % of "
        f"{judged.error.notna().sum()} steps. Hosts are network namespaces of one machine with two "
        f"cores; a step is the median of several turns."
    )
    page.figure(figure, "left: prediction and measurement; right: what each hook costs")
    page.section("Step time against error")
    page.text(ABOUT)
    for model, front in fronts(table):
        page.figure(front, f"{model}: no hook is better in both than those on the line")
    for cell, some in table.groupby("cell", sort=False):
        page.section(str(cell))
        columns = ("step_ms", "over_noop", "exposed_ms", "sent_mb", "predicted_ms")
        errors = [f"{100 * error:+.0f} %" if error == error else "" for error in some.error]
        values = [some.hook_name, *(some[name] for name in columns), errors]
        page.table(
            (
                "hook",
                "step [ms]",
                "over no-op",
                "exposed [ms]",
                "sent [MB]",
                "predicted [ms]",
                "error",
            ),
            list(zip(*values, strict=True)),
        )
        for plan in some.plan[some.plan != ""]:
            page.text(str(plan))
    page.write(path)
