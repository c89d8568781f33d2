"""``python -m experiments.when_it_pays``: the README's picture, from the table of ``scheme_cost``.

Step time over that of a dense all-reduce (``none``), for a few schemes at two rates of the line.
The table has medians over bf16's step; both are divided by that of ``none``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import matplotlib as mpl
import pandas as pd
import typer

RESULTS = Path("docs/results")
SCHEMES = {
    "no-op": "no-op: nothing is exchanged",
    "powersgd, rank 4": "PowerSGD, rank 4",
    "int8": "int8",
    "bf16": "bf16",
    "none": "none: dense all-reduce",
}
RATES = {"1gbit": "1 Gbit/s", "10gbit": "10 Gbit/s"}


def over_none(table: pd.DataFrame) -> pd.DataFrame:
    """Step times over that of ``none``: a row per scheme, a column per rate."""
    times = table.pivot(index="scheme", columns="rate", values="over bf16")
    return times.div(times.loc["none"]).loc[list(SCHEMES), list(RATES)]


def draw(ratios: pd.DataFrame, path: Path) -> None:
    """Writes the picture: a panel per rate."""
    mpl.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(RATES), figsize=(9, 2.8), sharey=True, layout="constrained")
    for (rate, title), panel in zip(RATES.items(), axes, strict=True):
        values = ratios[rate].iloc[::-1]
        colors = ["#3b6ea5" if ratio < 1 else "#9aa1ad" for ratio in values]
        bars = panel.barh([SCHEMES[name] for name in values.index], values, color=colors)
        panel.bar_label(bars, fmt="%.2f", padding=-27, color="white")
        panel.axvline(1, color="#444", lw=0.8)
        panel.set(title=title, xlabel="step time over that of a dense all-reduce", xlim=(0, 1.35))
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main(
    table: Annotated[Path, typer.Option(help="Written by experiments.scheme_cost.")] = (
        RESULTS / "scheme_cost" / "scheme_cost.csv"
    ),
    out: Annotated[Path, typer.Option(help="The picture.")] = (
        RESULTS / "bandwidth" / "when_it_pays.png"
    ),
) -> None:
    """Draws the picture and prints its numbers."""
    ratios = over_none(pd.read_csv(table))
    typer.echo(ratios.to_string(float_format="{:.2f}".format))
    draw(ratios, out)


if __name__ == "__main__":
    typer.run(main)
