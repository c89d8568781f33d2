"""Draws a comparison of schemes: speed-up over bf16, by number of ranks and by bandwidth."""

from __future__ import annotations

from itertools import cycle, product
from pathlib import Path
from typing import Any

import numpy as np

from commhooks.core.settings import shown
from commhooks.predict.simulate import BANDWIDTHS, BASELINE, Comparison
from ddp_core import needs

__all__ = ["check_format", "draw"]

# Okabe and Ito: colours that everyone can tell apart. Grey is for bf16.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442")
_LINES, _GREY = ("-", "--", ":"), "#555555"
_SPEED_UP = "speed-up over bf16 (times)"
_TICKS = tuple(base * 10.0**power for power in range(-3, 4) for base in (1, 2, 5))


def check_format(path: Path) -> None:
    """Checks that a picture can be written under a name, before anything is computed for it.

    Raises:
        ValueError: its ending is not that of a format.
        MissingPackageError: matplotlib is not installed.
    """
    with needs("The picture", "matplotlib"):
        from matplotlib.figure import Figure
    known = Figure().canvas.get_supported_filetypes()
    # Without an ending matplotlib would add one, and write another file than the one named.
    if path.suffix[1:].lower() not in known:
        raise ValueError(
            f"the ending of a picture's name says its format, got {shown(str(path))}: one of "
            f"{', '.join(f'.{ending}' for ending in sorted(known))}"
        )


def draw(comparison: Comparison, path: Path) -> None:
    """Draws a row per fabric: left over the ranks, right over the bandwidth between nodes.

    Args:
        comparison: the predictions.
        path: of the picture; its ending decides the format.

    Raises:
        MissingPackageError: matplotlib is not installed.
    """
    with needs("The picture", "matplotlib"):
        from matplotlib.figure import Figure  # pyplot would look for a display

    rows = len(comparison.fabrics)
    figure = Figure(figsize=(9.0, 0.9 + 3.2 * rows), layout="constrained")
    panels = figure.subplots(rows, 2, squeeze=False)
    middle = len(comparison.ranks) // 2  # of the numbers of ranks that were asked for
    over_ranks, over_bandwidth = comparison.speedup, comparison.speedup_by_bandwidth
    for f, fabric in enumerate(comparison.fabrics):
        left, right = panels[f]
        _lines(comparison, left, np.array(comparison.sizes), over_ranks[:, :, f])
        left.set(xscale="log", xlabel="ranks", title=fabric.name)
        left.set_xticks([4**power for power in range(1, 8)])
        left.set_xticklabels([f"{4**power:,}" for power in range(1, 8)])
        left.minorticks_off()
        gbit = 8 * BANDWIDTHS / 1e9
        _lines(comparison, right, gbit, over_bandwidth[:, middle, f])
        own = 8 * fabric.between.bandwidth / 1e9
        right.set_ylabel(_SPEED_UP)
        right.axvline(own, color=_GREY, linewidth=0.8, linestyle=":")
        right.annotate(
            f"{fabric.name}", (own, 0.99), xycoords=("data", "axes fraction"),
            xytext=(3, 0), textcoords="offset points", va="top", fontsize=8, color=_GREY,
        )  # fmt: skip
        count = comparison.ranks[middle]
        right.set(xscale="log", xlim=(gbit[0], gbit[-1]), xlabel="bandwidth between nodes [Gbit/s]")
        right.xaxis.set_major_formatter("{x:,g}")
        right.set_title(f"{count:,} ranks, latency as on {fabric.name}")
        left.set_ylabel(_SPEED_UP)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.suptitle(f"{comparison.workload.name}: speed-up over bf16 (predicted)")
    figure.legend(handles, labels, loc="outside lower center", ncols=min(5, len(labels)))
    figure.savefig(path, dpi=130)


def _lines(comparison: Comparison, panel: Any, x: Any, speedup: Any) -> None:
    styles = cycle(product(_LINES, _COLOURS))
    for scheme, y in zip(comparison.schemes, speedup, strict=True):
        if scheme == BASELINE:
            panel.axhline(1.0, color=_GREY, linewidth=1.2, label=scheme)
            continue
        line, colour = next(styles)
        panel.plot(x, y, linestyle=line, color=colour, linewidth=1.8, label=scheme)
    panel.set_yscale("log")
    # Factors of a loss and a gain look alike on this scale; powers of ten would label one line.
    least, most = min(1.0, float(np.nanmin(speedup))), max(1.0, float(np.nanmax(speedup)))
    ticks = [one for one in _TICKS if 0.7 * least <= one <= 1.4 * most]
    panel.set_yticks(ticks, [f"{one:,g}" for one in ticks])
    panel.minorticks_off()
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(color="#dddddd", linewidth=0.6)
