"""Writes the sentences that explain the tables."""

from __future__ import annotations

import pandas as pd

from experiments.bandwidth.links import Link
from experiments.bandwidth.table import BASE, FLOOR
from experiments.tools.schemes import NO_HOOK

__all__ = ["HOW_TO_READ", "verdict"]

FAITHFUL = 0.05  # update error up to which the averages of a scheme count as exact

HOW_TO_READ = f"""\
How to read the tables
  against none  step time over that of no compression, in the same turn: below 1
                the scheme saves time. Half of the turns lie in the next range
  pays          yes (no): three quarters of the turns, or more, were faster
                (slower) than without compression; even: neither
  MB sent       by a process in a step, and the share of dense bytes it saves
  update error  of the averages that the optimizer got over the run: 0 % if all
                has arrived, 100 % if nothing has. Empty for schemes that return
                no average (momentum, signs, local gradients)
  loss          on held-out data, of a short run with one seed: differences of a
                few percent mean nothing
  {NO_HOOK}     DistributedDataParallel alone; the row `{BASE}` is a hook that
                compresses nothing
  {FLOOR}          sends nothing, so ranks drift apart: no scheme can be faster"""


def verdict(link: Link, rows: pd.DataFrame) -> str:
    """Returns a summary of a link's table: whether anything pays, and what is fastest."""
    by_name, where = rows.set_index("scheme"), link.where
    if (rows["how"] == "computed").any():
        where += ", as computed from bytes,"
    if BASE not in by_name.index:
        return f"{where} nothing was compared with `{BASE}`, which was not run."
    sentence = f"{where} a step without compression takes {_ms(by_name.loc[BASE])}"
    if FLOOR in by_name.index:
        sentence += f", and {_ms(by_name.loc[FLOOR])} if nothing is sent ({FLOOR})"
    schemes = by_name.drop(index=[BASE, FLOOR, NO_HOOK], errors="ignore").sort_values("over_none")
    if schemes.empty:
        return f"{sentence}."
    paying = schemes[schemes["pays"] == "yes"]
    if paying.empty:
        return (
            f"{sentence}. Nothing pays: the fastest scheme, {schemes.index[0]}, takes "
            f"{_times(schemes.iloc[0])} of the time of {BASE}."
        )
    count = "all" if len(paying) == len(schemes) else f"{len(paying)} of {len(schemes)}"
    sentence += (
        f". It pays with {count} schemes: {paying.index[0]} is the fastest and takes "
        f"{_times(paying.iloc[0])} of the time of {BASE}"
    )
    faithful = paying[paying["update_error"] <= FAITHFUL]
    if not faithful.empty and faithful.index[0] != paying.index[0]:
        sentence += (
            f"; of those with an update error up to {FAITHFUL * 100:g} % it is "
            f"{faithful.index[0]}, with {_times(faithful.iloc[0])}"
        )
    return f"{sentence}."


def _ms(row: pd.Series) -> str:
    return f"{row['step_ms']:.0f} ms"


def _times(row: pd.Series) -> str:
    return f"{row['over_none']:.2f}"
