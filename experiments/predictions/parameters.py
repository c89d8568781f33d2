"""Holds the parameters of the predictions, and fits them to a part of the published points.

Which points are used is fixed here by a rule, before anything is compared: every second number of
ranks, every second size, one method out of several. All other points judge.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from commhooks.predict import PRESETS, Fabric, Link
from commhooks.predict._collectives import collective_seconds

__all__ = [
    "fit",
    "fitted_rows",
    "nodes_of",
    "parameters",
    "published",
    "quantised_seconds",
    "seconds",
]

_FOLDER = Path(__file__).parent / "published"
_FILE = Path(__file__).with_name("parameters.json")


def published(name: str) -> pd.DataFrame:
    """Returns a table of ``experiments/predictions/published``."""
    return pd.read_csv(_FOLDER / f"{name}.csv")


def parameters() -> dict[str, Any]:
    """Returns the parameters that :func:`fit` wrote."""
    values: dict[str, Any] = json.loads(_FILE.read_text(encoding="utf-8"))
    return values


def fit() -> None:
    """Fits all parameters, and writes them to ``parameters.json``."""
    values = {
        "all_reduce": _fit_all_reduce(),
        "diloco": _fit_diloco(),
        "grace": _fit_grace(),
        "quickreduce": _fit_quickreduce(),
    }
    _FILE.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def fitted_rows(table: pd.DataFrame) -> pd.Series:
    """Returns which points of ``all_reduce.csv`` are fitted: every second of the ranks, or sizes.

    Every second number of ranks where there are several on a cluster, else every second size.
    """
    used = pd.Series(False, index=table.index)
    for _, rows in table.groupby("cluster"):
        several = rows[rows.ranks > rows.gpus_per_node].ranks.nunique() > 1
        of = rows.ranks if several else rows.bytes
        used[rows.index] = of.isin(sorted(of.unique())[::2])
    return used


def seconds(table: pd.DataFrame) -> NDArray[np.float64]:
    """Returns the measured times of ``all_reduce.csv``, from its bus bandwidths."""
    share = 2 * (table.ranks - 1) / table.ranks
    return np.asarray(share * table.bytes / (1e9 * table.busbw_GBps), dtype=np.float64)


def nodes_of(cluster: str) -> Fabric:
    """Returns the preset whose nodes a cluster of ``all_reduce.csv`` has: links inside of them.

    What the unnamed cluster has inside of its nodes is not known, and is not what limits it.
    """
    return PRESETS["p6-b200" if cluster.startswith("p6-b200") else "dgx-h100"]


def _fit_all_reduce() -> dict[str, dict[str, float]]:
    table = published("all_reduce")
    table = table[fitted_rows(table) & (table.ranks > table.gpus_per_node)]
    return {
        str(cluster): _link(rows, nodes_of(str(cluster)))
        for cluster, rows in table.groupby("cluster")
    }


def _link(rows: pd.DataFrame, fabric: Fabric) -> dict[str, float]:
    """Returns the link between nodes whose modelled times are nearest to measured ones."""
    measured = np.log(seconds(rows))

    def distance(point: tuple[float, ...]) -> float:
        candidate = replace(fabric, between=Link(*(10.0**exponent for exponent in point)))
        total = 0.0
        for ranks, some in rows.groupby("ranks"):
            times = collective_seconds("all_reduce", some.bytes, ranks=int(ranks), fabric=candidate)
            total += float(
                np.abs(np.log(times) - measured[rows.index.get_indexer(some.index)]).sum()
            )
        return total

    best = _least(distance, ((-5.5, -3.0), (10.0, 12.5), (-7.0, -4.0)))
    return {
        name: float(f"{10.0**exponent:.4g}")
        for name, exponent in zip(("latency", "bandwidth", "chunk_s"), best, strict=True)
    }


def _least(
    distance: Callable[[tuple[float, ...]], float], bounds: tuple[tuple[float, float], ...]
) -> tuple[float, ...]:
    """Returns the point of least distance, by grids that get finer around the best point."""
    centre = tuple((low + high) / 2 for low, high in bounds)
    width = tuple((high - low) / 2 for low, high in bounds)
    for _ in range(9):
        axes = [np.linspace(c - w, c + w, 7) for c, w in zip(centre, width, strict=True)]
        centre = min(product(*axes), key=distance)
        width = tuple(w / 2 for w in width)
    return tuple(map(float, centre))


def _fit_diloco() -> dict[str, float]:
    """Fits the share of a limited rate that TCP reaches, and the extra time of a first exchange.

    Fitted to DiLoCo at every step (an exchange of one message of 123 MB, by a ring), and to the
    first run of 128 steps at 1 Gbit/s, which has one exchange only. That NCCL sends the smaller
    buckets of DDP by its double tree follows from the run of DDP at 1 Gbit/s.
    """
    table = published("diloco")
    nbytes = 4 * table.parameters.iloc[0]
    once = table[(table.algorithm == "diloco") & (table.period == 1)]
    values = {}
    for rate, bits in (("50m", 50e6), ("1g", 1e9)):
        measured = once[once.rate == rate].exchange_ms.median() / 1e3
        values[f"share_{rate}"] = float(f"{1.5 * nbytes / (bits / 8) / measured:.4g}")
    rows = table[(table.period == 128) & (table.rate == "1g") & (table.repeat == 0)]
    first = rows[rows.algorithm == "diloco"].exchange_ms.iloc[0]
    usual = once[once.rate == "1g"].exchange_ms.median()
    values["start_s"] = float(f"{(first - usual) / 1e3:.3g}")
    values["tree_nbytes"] = 100_000_000
    return values


def _fit_grace() -> dict[str, Any]:
    """Fits the seconds of GRACE's encoders and decoders (TensorFlow) to its runs at 25 Gbit/s."""
    table = published("grace").set_index("method")
    step = 128 / 409.451  # a batch of 128 on one V100, published as 409.451 images per second
    codec = {
        method: float(f"{max(0.0, 8 * 128 / images - step):.3g}")
        for method, images in table.mpi_25g.items()
        if method != "none"
    }
    return {"compute_s": float(f"{step:.4g}"), "codec_s": codec}


def _fit_quickreduce() -> dict[str, Any]:
    """Fits the link to the dense times of 2 and 4 MB, and each codec to its extra time.

    A codec's time is a line through the same two sizes, as of a device at hand
    (:class:`commhooks.predict.ThisDevice`).
    """
    table = published("quickreduce").set_index("mb")
    sizes = np.array([2.0, 4.0]) * 2**20
    dense = 1e-6 * table.dense[[2, 4]].to_numpy()
    slope = (dense[1] - dense[0]) / 2**21
    # A ring of 4: each of 6 steps takes the latency and a quarter of the bytes.
    values: dict[str, Any] = {
        "latency": float(f"{(dense[0] - slope * sizes[0]) / 6:.4g}"),
        "bandwidth": float(f"{1.5 / slope:.4g}"),
    }
    for method in ("int8", "int6", "int4"):
        wire = quantised_seconds(method, sizes, values)
        codec = 1e-6 * table[method][[2, 4]].to_numpy() - wire
        per_byte = (codec[1] - codec[0]) / 2**21
        values[method] = {
            "s": float(f"{codec[0] - per_byte * sizes[0]:.4g}"),
            "s_per_byte": float(f"{per_byte:.4g}"),
        }
    return values


def quantised_seconds(
    method: str, sizes: NDArray[np.float64], link: dict[str, Any]
) -> NDArray[np.float64]:
    """Returns the time of messages of a two-phase exchange of float16 on 4 GPUs of a machine.

    Args:
        method: "int8", "int6" or "int4", with a scale of 16 bits per 32 entries.
        sizes: bytes of the float16 tensor.
        link: "latency" and "bandwidth" between two GPUs.
    """
    pair = Link(link["latency"], link["bandwidth"])
    fabric = Fabric("mi300", pair, inside=pair, ranks_per_node=4)
    codes = sizes * (int(method[3:]) + 0.5) / 16
    scatter = collective_seconds("all_to_all", codes, ranks=4, fabric=fabric)
    return scatter + collective_seconds("all_gather", codes / 4, ranks=4, fabric=fabric)
