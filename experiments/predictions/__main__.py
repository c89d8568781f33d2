"""Compares predictions with measurements that others published, from one file of parameters.

Run ``python -m experiments.predictions``: prints a table per study with the median and the largest
error, and writes all points, and a plot, to ``--out``. ``--fit`` fits the parameters anew, to the
points that are marked as fitted; all others judge.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import pandas as pd
import typer
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from commhooks.report._page import Page
from experiments.predictions.parameters import fit
from experiments.predictions.plot import UNITS, plotted
from experiments.predictions.studies import STUDIES, tabulated, unseen

# The medians, or for DiLoCo the largest error, that predictions are meant to keep to.
_ERRORS = (
    ("all_reduce", "dgx-h100-ndr400x8", "median", 0.06),
    ("diloco", None, "largest", 0.10),
    ("grace", "none", "median", 0.05),
    ("grace", "powersgd", "median", 0.05),
    ("grace", "randomk", "median", 0.10),
)
_TIE = 0.02  # ratios this near to 1 are neither a gain nor a loss
_OUT = Path("docs/results/predictions")


def judged(table: pd.DataFrame) -> pd.DataFrame:
    """Returns the points that were not used to fit parameters."""
    return table[~table.fitted]


def wrong_signs(table: pd.DataFrame) -> pd.DataFrame:
    """Returns the rows of ratios that are measured on the other side of 1 than predicted."""
    decided = judged(table)
    decided = decided[(decided.measured - 1).abs() > _TIE]
    return decided[(decided.predicted > 1) != (decided.measured > 1)]


def summary(tables: dict[str, pd.DataFrame]) -> pd.DataFrame:
    """Returns median and largest error, and wrong signs, of each group of each study."""
    rows = []
    for study, table in tables.items():
        for group, some in judged(table).groupby("group"):
            errors = some.error.abs()
            ratios = study in ("grace_signs", "quickreduce")
            rows.append(
                {
                    "study": study,
                    "group": group,
                    "fitted": int((table.group == group).sum() - len(some)),
                    "judged": len(some),
                    "median": errors.median(),
                    "largest": errors.max(),
                    "wrong_signs": len(wrong_signs(some)) if ratios else None,
                    "goal": next(
                        (
                            f"{what} {limit:.0%}"
                            for name, group_of_limit, what, limit in _ERRORS
                            if name == study and group_of_limit in (None, group)
                        ),
                        "no wrong sign" if ratios else "",
                    ),
                }
            )
    return pd.DataFrame(rows)


def main(
    fit_first: Annotated[bool, typer.Option("--fit", help="Fit the parameters anew.")] = False,
    out: Annotated[Path, typer.Option(help="Folder of the tables and the plot.")] = _OUT,
) -> None:
    """Compares predictions with measurements that others published."""
    if fit_first:
        fit()
    tables = {study: tabulated(study) for study in STUDIES}
    errors = summary(tables)
    console = Console()
    console.print(_shown(errors))
    out.mkdir(parents=True, exist_ok=True)
    pd.concat(tables.values()).to_csv(out / "points.csv", index=False, float_format="%.4g")
    errors.to_csv(out / "summary.csv", index=False, float_format="%.3g")
    unseen().to_csv(out / "diloco_unseen.csv", index=False, float_format="%.5g")
    figure = plotted(tables)
    figure.savefig(out / "predictions.png", dpi=120)
    _page(errors, tables, figure).write(out / "predictions.html")
    console.print(f"all points, a plot and a page are in {out}")


def _page(errors: pd.DataFrame, tables: dict[str, pd.DataFrame], figure: Figure) -> Page:
    page = Page("Predictions beside what others measured")
    page.text(
        "One file of parameters for all studies. Points by which it was fitted are not judged."
    )
    rows = [
        (
            _NAMES[row.study, row.group],
            row.judged,
            f"{row.median:.1%}",
            f"{row.largest:.1%}",
            "" if pd.isna(row.wrong_signs) else f"{row.wrong_signs:.0f}",
            row.goal,
        )
        for row in errors.itertuples()
    ]
    page.table(("study", "points", "median error", "largest", "wrong signs", "goal"), rows)
    page.figure(figure, "measured and predicted")
    for study, table in tables.items():
        page.section(study.replace("_", " "))
        shown = [name for name in table.columns[1:] if table[name].notna().any()]
        times = ("predicted", "measured")
        heads = [f"{name} ({UNITS[study]})" if name in times else name for name in shown]
        page.table(heads, table[shown].itertuples(index=False, name=None))
    return page


def _shown(errors: pd.DataFrame) -> Table:
    table = Table(title="predictions beside what others measured")
    table.add_column("study", no_wrap=True)
    for name in ("judged", "median", "max", "signs"):
        table.add_column(name, justify="right")
    table.add_column("goal", no_wrap=True)
    for row in errors.itertuples():
        signs = "" if pd.isna(row.wrong_signs) else f"{row.wrong_signs:.0f}"
        figures = (f"{row.median:.1%}", f"{row.largest:.1%}")
        table.add_row(_NAMES[row.study, row.group], str(row.judged), *figures, signs, row.goal)
    return table


_NAMES = {
    ("all_reduce", "dgx-h100-ndr400x8"): "all-reduce, 32 to 8192 H100",
    ("all_reduce", "p6-b200-efav4"): "all-reduce, 32 B200",
    ("all_reduce", "unnamed-4node-cluster"): "all-reduce, 32 GPUs",
    ("diloco", "ddp"): "slow lines, DDP",
    ("diloco", "diloco"): "slow lines, DiLoCo",
    ("diloco", "localsgd"): "slow lines, local SGD",
    ("grace", "none"): "GRACE 1 Gbit/s, dense",
    ("grace", "powersgd"): "GRACE 1 Gbit/s, PowerSGD",
    ("grace", "randomk"): "GRACE 1 Gbit/s, random-k",
    ("grace_signs", "compressed over dense"): "GRACE 10 Gbit/s, ratios",
    ("quickreduce", "int8"): "QuickReduce int8, ratios",
    ("quickreduce", "int6"): "QuickReduce int6, ratios",
    ("quickreduce", "int4"): "QuickReduce int4, ratios",
}


if __name__ == "__main__":
    typer.run(main)
