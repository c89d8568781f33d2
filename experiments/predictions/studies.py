"""Predicts what others measured: a table of predicted and measured values per study."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

import commhooks
from commhooks.predict import Device, Fabric, Link, Workload, predict_step
from commhooks.predict._collectives import collective_seconds
from commhooks.predict._models import model
from experiments.predictions.parameters import (
    fitted_rows,
    nodes_of,
    parameters,
    published,
    quantised_seconds,
    seconds,
)
from experiments.tools.local_steps import predict_local

__all__ = ["STUDIES", "tabulated", "unseen"]

_FREE = Device("codecs are counted apart", math.inf, 0.0, math.nan)
Row = dict[str, Any]


def all_reduce() -> Iterator[Row]:
    """Yields times of all-reduce between nodes of 8 GPUs, in microseconds."""
    table = published("all_reduce")
    table = table.assign(used=fitted_rows(table), us=1e6 * seconds(table))
    for (cluster, ranks), rows in table[table.ranks > 8].groupby(["cluster", "ranks"]):
        link = Link(**parameters()["all_reduce"][cluster])
        fabric = replace(nodes_of(cluster), between=link)
        times = collective_seconds("all_reduce", rows.bytes, ranks=int(ranks), fabric=fabric)
        for row, predicted in zip(rows.itertuples(), 1e6 * times, strict=True):
            yield {
                "group": cluster,
                "case": f"{ranks} ranks, {_size(row.bytes)}",
                "fitted": row.used,
                "predicted": predicted,
                "measured": row.us,
            }


def diloco() -> Iterator[Row]:
    """Yields mean step times of training over limited lines, in milliseconds."""
    for row in published("diloco").itertuples():
        used = row.algorithm == "diloco" and (
            row.period == 1 or (row.period == 128 and row.rate == "1g" and row.repeat == 0)
        )
        if row.algorithm == "ddp":
            used = row.rate == "1g"  # decides between ring and tree
            step_s = _ddp(row.compute_ms / 1e3, _BITS[row.rate])
        else:
            step_s = _local(row, _BITS[row.rate])
        yield {
            "group": row.algorithm,
            "case": f"H = {row.period}, {row.rate}, run {row.repeat}",
            "fitted": used,
            "predicted": 1e3 * step_s,
            "measured": row.step_ms_mean,
        }


# "unshaped": what the data sheet of these machines (g6e.2xlarge) says.
_BITS = {"50m": 50e6, "200m": 200e6, "1g": 1e9, "5g": 5e9, "unshaped": 20e9}
_UNSHAPED = (
    0.84  # assumed share of a rate that TCP reaches without a limit, as of the presets 10gbe, 25gbe
)


def unseen() -> pd.DataFrame:
    """Returns predictions for rates of the same study whose measurements were not available."""
    rows = []
    for rate in ("200m", "5g"):
        rows.append(
            {
                "algorithm": "ddp",
                "period": 1,
                "rate": rate,
                "step_ms": 1e3 * _ddp(0.0226, _BITS[rate]),
            }
        )
        for period in (1, 8, 32, 128):
            compute = 0.0266 if period == 1 else 0.0253
            step = predict_local(
                commhooks.make("none"),
                _workload(compute),
                every=period,
                ranks=4,
                fabric=_limited(_BITS[rate]),
                device=_FREE,
            )
            rows.append(
                {
                    "algorithm": "diloco",
                    "period": period,
                    "rate": rate,
                    "step_ms": 1e3 * step.step_s,
                    "exchange_ms": 1e3 * step.exchange_s,
                    "utilisation": step.utilisation,
                }
            )
    return pd.DataFrame(rows)


def _limited(bits: float) -> Fabric:
    """Returns four machines on lines that ``tc`` limits: TCP reaches a share of the rate."""
    fitted = parameters()["diloco"]
    # Measured at two rates; in between by the logarithm of the rate.
    measured = [fitted["share_50m"], fitted["share_1g"]]
    share = np.interp(math.log(bits), [math.log(50e6), math.log(1e9)], measured)
    if bits == _BITS["unshaped"]:
        share = _UNSHAPED
    return Fabric(
        "four machines",
        Link(50e-6, bits / 8 * float(share)),
        tree_nbytes=fitted["tree_nbytes"],
    )


def _workload(compute_s: float) -> Workload:
    layers = model("diloco-30m").layers
    return Workload("30.8 M", layers, forward_s=compute_s / 3, backward_s=2 * compute_s / 3)


def _ddp(compute_s: float, bits: float) -> float:
    step = predict_step(
        commhooks.make("none"), _workload(compute_s), ranks=4, fabric=_limited(bits), device=_FREE
    )
    return step.step_s


def _local(row: Any, bits: float) -> float:
    """Returns the mean step of a run, of its own numbers of steps and exchanges."""
    step = predict_local(
        commhooks.make("none"),
        _workload(row.compute_ms / 1e3),
        every=row.period,
        ranks=4,
        fabric=_limited(bits),
        device=_FREE,
    )
    waits = row.exchanges * step.exposed_s + parameters()["diloco"]["start_s"]
    return step.compute_s + waits / row.steps


def grace() -> Iterator[Row]:
    """Yields steps of ResNet-50 on 8 V100 at 1 Gbit/s, in milliseconds."""
    for method, predicted, images in _grace("mpi_1g", 1e9):
        if method.split("_")[0] in ("none", "powersgd", "randomk"):
            group = method.split("_")[0]
            yield {
                "group": group,
                "case": method,
                "fitted": False,
                "predicted": 1e3 * predicted,
                "measured": 1e3 * 8 * 128 / images,
            }


def grace_signs() -> Iterator[Row]:
    """Yields the times of methods over those without compression, at 10 Gbit/s."""
    rows = list(_grace("mpi_10g", 10e9))
    _, dense, images = rows[0]
    for method, predicted, kernel_s in rows[1:]:
        yield {
            "group": "compressed over dense",
            "case": method,
            "fitted": False,
            "predicted": predicted / dense,
            "measured": images / kernel_s,
        }


def _grace(column: str, bits: float) -> Iterator[tuple[str, float, float]]:
    """Yields method, predicted seconds of a step, and measured images per second.

    Horovod over MPI on TCP, without overlap with backward (the published steps are as long as
    computing and communicating one after the other); one tensor is encoded while another travels.
    """
    fitted = parameters()["grace"]
    fabric = Fabric("8 machines", Link(50e-6, bits / 8), library="mpi")
    for row in published("grace").itertuples():
        wire = float(collective_seconds(row.collective, row.nbytes, ranks=8, fabric=fabric))
        codec = fitted["codec_s"].get(row.method, 0.0)
        yield row.method, fitted["compute_s"] + max(wire, codec), getattr(row, column)


def quickreduce() -> Iterator[Row]:
    """Yields the times of quantised all-reduces over dense ones, on 4 GPUs of one machine."""
    table, fitted = published("quickreduce"), parameters()["quickreduce"]
    pair = Link(fitted["latency"], fitted["bandwidth"])
    fabric = Fabric("mi300", pair, inside=pair, ranks_per_node=4, library="gloo")  # a ring
    sizes = table.mb.to_numpy() * 2**20
    dense = collective_seconds("all_reduce", sizes, ranks=4, fabric=fabric)
    for method in ("int8", "int6", "int4"):
        codec = fitted[method]["s"] + fitted[method]["s_per_byte"] * sizes
        times = quantised_seconds(method, sizes, fitted) + codec
        for mb, predicted, measured in zip(
            table.mb, times / dense, table[method] / table.dense, strict=True
        ):
            yield {
                "group": method,
                "case": f"{mb:g} MB",
                "fitted": mb in (2, 4),
                "predicted": predicted,
                "measured": measured,
            }


def _size(nbytes: float) -> str:
    return f"{nbytes / 2**20:g} MiB" if nbytes < 2**30 else f"{nbytes / 2**30:g} GiB"


STUDIES: dict[str, Callable[[], Iterator[Row]]] = {
    "all_reduce": all_reduce,
    "diloco": diloco,
    "grace": grace,
    "grace_signs": grace_signs,
    "quickreduce": quickreduce,
}


def tabulated(study: str) -> pd.DataFrame:
    """Returns the table of a study, with the error of each prediction."""
    table = pd.DataFrame(list(STUDIES[study]()))
    table.insert(0, "study", study)
    return table.assign(error=table.predicted / table.measured - 1)
