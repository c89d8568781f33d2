"""Compares predicted steps of schemes with bf16, across ranks, fabrics and bandwidths."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import cycle, product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from commhooks.core._scheme import Scheme
from commhooks.core._settings import shown
from commhooks.predict._device import Device
from commhooks.predict._fabric import Fabric, Link
from commhooks.predict._step import MAX_RANKS, Steps, predict_steps
from commhooks.predict._workload import Workload
from commhooks.wrappers._make import make
from ddp_core import needs

__all__ = [
    "BANDWIDTHS",
    "BASELINE",
    "MARGIN",
    "Comparison",
    "Row",
    "check_format",
    "compare",
    "draw",
    "write_csv",
]


BASELINE = "bf16"
# A scheme pays if it saves this share of the step: predictions are not more exact than that.
MARGIN = 0.02
WORLD_SIZES = tuple(2**power for power in range(1, 15))  # 2 to MAX_RANKS
# Bytes per second: 10 Mbit/s to 10 Tbit/s.
BANDWIDTHS = 1.25e6 * 10.0 ** np.linspace(0, 6, 121)


@dataclass(frozen=True)
class Row:
    """Holds the prediction for one scheme, number of ranks and fabric.

    Attributes:
        fabric, ranks, scheme: what is predicted.
        step_s, exposed_s, wire_s, codec_s: see :class:`commhooks.predict.Step`.
        speedup: step with bf16 over this step.
        payload_nbytes: bytes that a rank hands to collectives, per step.
        rank_nbytes: bytes that a rank sends, per step.
        link_nbytes: bytes that a node sends to others, per step, at least.
        rounds: collectives per step.
        pays_from, pays_to: bandwidths between nodes, bytes per second, between which the scheme
            saves ``MARGIN`` of the step with bf16 or more, with the latency of the fabric. 0 and
            infinite if it does to the ends of ``BANDWIDTHS``, NaN if nowhere.
    """

    fabric: str
    ranks: int
    scheme: str
    step_s: float
    exposed_s: float
    wire_s: float
    codec_s: float
    speedup: float
    payload_nbytes: int
    rank_nbytes: float
    link_nbytes: float
    rounds: int
    pays_from: float
    pays_to: float


@dataclass(frozen=True)
class Comparison:
    """Holds predictions of schemes for one step of one model.

    Attributes:
        workload: the step without communication.
        schemes: by the names that are shown; "bf16" is among them.
        ranks: numbers of ranks that were asked for.
        sizes: numbers of ranks that were predicted: more, for where a scheme stops paying.
        fabrics: the links.
        steps: predictions by scheme, size and fabric.
        by_bandwidth: predictions by scheme, number of ranks, and fabric times bandwidth.
        link_nbytes: bytes that a node sends, by scheme, number of ranks and fabric.
    """

    workload: Workload
    schemes: Mapping[str, Scheme]
    ranks: tuple[int, ...]
    sizes: tuple[int, ...]
    fabrics: tuple[Fabric, ...]
    steps: Steps
    by_bandwidth: Steps
    link_nbytes: NDArray[np.float64]

    @property
    def speedup(self) -> NDArray[np.float64]:
        """Returns the speedup over bf16, by scheme, number of ranks and fabric."""
        return self._over_baseline(self.steps)

    @property
    def speedup_by_bandwidth(self) -> NDArray[np.float64]:
        """Returns the speedup over bf16 by scheme, ranks, fabric and bandwidth."""
        speedup = self._over_baseline(self.by_bandwidth)
        shape = (len(self.schemes), len(self.ranks), len(self.fabrics), len(BANDWIDTHS))
        return speedup.reshape(shape)

    def _over_baseline(self, steps: Steps) -> NDArray[np.float64]:
        baseline = list(self.schemes).index(BASELINE)
        speedup: NDArray[np.float64] = steps.step_s[baseline] / steps.step_s
        return speedup

    def rows(self) -> Iterator[Row]:
        """Yields the predictions by fabric, number of ranks and scheme."""
        speedup, curves = self.speedup, self.speedup_by_bandwidth
        for f, fabric in enumerate(self.fabrics):
            for r, ranks in enumerate(self.ranks):
                for s, scheme in enumerate(self.schemes):
                    at = (s, self.sizes.index(ranks), f)
                    step = self.steps[at]
                    pays_from, pays_to = _paying(curves[s, r, f])
                    yield Row(
                        fabric.name,
                        ranks,
                        scheme,
                        step_s=step.step_s,
                        exposed_s=step.exposed_s,
                        wire_s=step.wire_s,
                        codec_s=step.codec_s,
                        speedup=float(speedup[at]),
                        payload_nbytes=step.payload_nbytes,
                        rank_nbytes=step.wire_nbytes,
                        link_nbytes=float(self.link_nbytes[s, r, f]),
                        rounds=step.rounds,
                        pays_from=pays_from,
                        pays_to=pays_to,
                    )

    def paying_sizes(self, scheme: str, fabric: int = 0) -> list[int]:
        """Returns the numbers of ranks at which a scheme pays on a fabric."""
        gains = self.speedup[list(self.schemes).index(scheme), :, fabric]
        return [size for size, gain in zip(self.sizes, gains, strict=True) if gain >= 1 + MARGIN]


def _paying(speedup: NDArray[np.float64]) -> tuple[float, float]:
    """Returns the first and the last bandwidth at which a scheme pays, between predictions."""
    paying = np.flatnonzero(speedup >= 1 + MARGIN)
    if not len(paying):
        return math.nan, math.nan
    first, last = int(paying[0]), int(paying[-1])
    return (
        0.0 if first == 0 else _crossing(speedup, first - 1, first),
        math.inf if last == len(BANDWIDTHS) - 1 else _crossing(speedup, last + 1, last),
    )


def _crossing(speedup: NDArray[np.float64], outside: int, inside: int) -> float:
    """Returns the bandwidth, between two, at which the saving equals the margin."""
    at = [outside, inside]
    return float(np.exp(np.interp(1 + MARGIN, speedup[at], np.log(BANDWIDTHS[at]))))


def compare(
    workload: Workload,
    schemes: Mapping[str, Scheme],
    *,
    ranks: Sequence[int],
    fabrics: Sequence[Fabric],
    device: Device,
    cap_mb: float | None = None,
) -> Comparison:
    """Predicts steps of schemes, with "bf16" first, and where each stops paying.

    Args:
        workload: the step without communication.
        schemes: by the names that are shown.
        ranks: numbers of ranks, 2 to 16,384 each.
        fabrics: the links.
        device: computes the schemes' part.
        cap_mb: MiB at which a bucket is full. None: 1 MiB for the first one and 25 MiB for others,
            as DistributedDataParallel has them without ``bucket_cap_mb``.

    Raises:
        ValueError: a number of ranks is below 2 or above 16,384, or there is no fabric.
        PredictionError: a scheme cannot be predicted; the message says why.

    Example:
        >>> found = compare(model("gpt2").workload(DEVICES["a100"]), {"int8": make("int8")},
        ...                 ranks=[8], fabrics=[fabric("10gbe")], device=DEVICES["a100"])
        >>> [(row.scheme, row.step_s) for row in found.rows()]
    """
    if not ranks or min(ranks) < 2 or max(ranks) > MAX_RANKS:
        raise ValueError(
            f"compare(ranks=...): one number or more, 2 at least and {MAX_RANKS:,} at most, got "
            f"{shown(list(ranks))}"
        )
    if not fabrics:
        raise ValueError("compare(fabrics=...): one or more, got none")
    requested = tuple(dict.fromkeys(ranks))
    sizes = tuple(sorted({*requested, *WORLD_SIZES}))
    compared = {BASELINE: make(BASELINE)} | dict(schemes)
    made = list(compared.values())
    scaled = [
        replace(fabric, between=replace(fabric.between, bandwidth=float(bandwidth)))
        for fabric in fabrics
        for bandwidth in BANDWIDTHS
    ]

    cap, first = (25.0, 1.0) if cap_mb is None else (cap_mb, cap_mb)

    def predicted(counts: Sequence[int], links: Sequence[Fabric]) -> Steps:
        return predict_steps(
            made, workload, ranks=counts, fabrics=links, device=device, cap_mb=cap, first_mb=first
        )

    # Links on which a byte between nodes takes a second, and nothing else takes any time.
    counting = [_counting(fabric) for fabric in fabrics]
    return Comparison(
        workload,
        compared,
        requested,
        sizes,
        tuple(fabrics),
        steps=predicted(sizes, fabrics),
        by_bandwidth=predicted(requested, scaled),
        link_nbytes=predicted(requested, counting).wire_s,
    )


def _counting(fabric: Fabric) -> Fabric:
    free = Link(0.0, math.inf)
    inside = None if fabric.inside is None else free
    multicast = None if fabric.multicast is None else math.inf
    return replace(fabric, between=Link(0.0, 1.0), inside=inside, multicast=multicast)


def write_csv(comparison: Comparison, path: Path) -> None:
    """Writes a row per fabric, number of ranks and scheme, with the attributes of :class:`Row`."""
    names = [field.name for field in fields(Row)]
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(names)
        for row in comparison.rows():
            table.writerow([getattr(row, name) for name in names])


# ---- pictures


# Okabe and Ito: colours that everyone can distinguish. Grey is for bf16.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442")
_LINES, _GREY = ("-", "--", ":"), "#555555"
_SPEED_UP = "speed-up over bf16 (times)"
_TICKS = tuple(base * 10.0**power for power in range(-3, 4) for base in (1, 2, 5))


def check_format(path: Path) -> None:
    """Checks that a picture can be written to a path, before anything is computed for it.

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
    """Draws a row per fabric: speedup over ranks, and over the bandwidth between nodes.

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
        by_ranks, by_bandwidth = panels[f]
        _lines(comparison, by_ranks, np.array(comparison.sizes), over_ranks[:, :, f])
        by_ranks.set(xscale="log", xlabel="ranks", title=fabric.name)
        by_ranks.set_xticks([4**power for power in range(1, 8)])
        by_ranks.set_xticklabels([f"{4**power:,}" for power in range(1, 8)])
        by_ranks.minorticks_off()
        gbit = 8 * BANDWIDTHS / 1e9
        _lines(comparison, by_bandwidth, gbit, over_bandwidth[:, middle, f])
        gigabits = 8 * fabric.between.bandwidth / 1e9
        by_bandwidth.set_ylabel(_SPEED_UP)
        by_bandwidth.axvline(gigabits, color=_GREY, linewidth=0.8, linestyle=":")
        by_bandwidth.annotate(
            f"{fabric.name}", (gigabits, 0.99), xycoords=("data", "axes fraction"),
            xytext=(3, 0), textcoords="offset points", va="top", fontsize=8, color=_GREY,
        )  # fmt: skip
        count = comparison.ranks[middle]
        by_bandwidth.set(
            xscale="log", xlim=(gbit[0], gbit[-1]), xlabel="bandwidth between nodes [Gbit/s]"
        )
        by_bandwidth.xaxis.set_major_formatter("{x:,g}")
        by_bandwidth.set_title(f"{count:,} ranks, latency as on {fabric.name}")
        by_ranks.set_ylabel(_SPEED_UP)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.suptitle(f"{comparison.workload.name}: speed-up over bf16 (predicted)")
    figure.legend(handles, labels, loc="outside lower center", ncols=min(5, len(labels)))
    figure.savefig(path, dpi=130)


def _lines(comparison: Comparison, panel: Any, bandwidths: Any, speedup: Any) -> None:
    styles = cycle(product(_LINES, _COLOURS))
    for scheme, y in zip(comparison.schemes, speedup, strict=True):
        if scheme == BASELINE:
            panel.axhline(1.0, color=_GREY, linewidth=1.2, label=scheme)
            continue
        line, colour = next(styles)
        panel.plot(bandwidths, y, linestyle=line, color=colour, linewidth=1.8, label=scheme)
    panel.set_yscale("log")
    # Factors of a loss and a gain look alike on this scale; powers of ten would label one line.
    least, most = min(1.0, float(np.nanmin(speedup))), max(1.0, float(np.nanmax(speedup)))
    ticks = [tick for tick in _TICKS if 0.7 * least <= tick <= 1.4 * most]
    panel.set_yticks(ticks, [f"{tick:,g}" for tick in ticks])
    panel.minorticks_off()
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(color="#dddddd", linewidth=0.6)
