"""Measures the step time of every scheme on lines of given rates.

Run ``python -m experiments.step_cost schemes``. Two hosts (network namespaces) on one switch train
a transformer of 3.3 M parameters (13 MB of gradients) in turns, one or four steps per scheme.
``over no-op`` is the step time over that of the no-op hook, which exchanges nothing, in the same
turn: the part above 1 waits for the network or computes codes. ``over bf16`` is the step time over
that of bf16: below 1 a scheme saves time. Both are medians; the quartiles are those of ``over
bf16``. Needs what ``experiments/tools/namespaces.py`` needs.
"""

from __future__ import annotations

import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import matplotlib as mpl
import pandas as pd
import torch
import typer
from rich.progress import track
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import commhooks
import commhooks.research.baselines
from experiments.tools.hosts import run_on_hosts
from experiments.tools.namespaces import reason_not_to_run
from experiments.tools.processes import Send
from experiments.tools.tables import printed
from experiments.tools.tasks import CharTransformer
from experiments.tools.turns import in_turns, quartiles, seconds_per_step

NOOP, BASE = "no-op", "bf16"
SCHEMES: dict[str, tuple[str, dict[str, Any]]] = {
    NOOP: ("noop", {}),
    "none": ("none", {}),
    BASE: ("bf16", {}),
    "int8": ("int8", {}),
    "global_qsgd": ("global_qsgd", {}),
    "intsgd": ("intsgd", {}),
    "int4": ("int4", {}),
    "sdp4bit": ("sdp4bit", {}),
    "onebit": ("onebit", {}),
    "onebit_adam": ("onebit_adam", {"freeze_step": 1}),  # dense in the warm-up only
    "eden, 2 bits": ("eden", {"bits": 2}),
    "powersgd, rank 4": ("powersgd", {"rank": 4}),
    "acpsgd, rank 4": ("acpsgd", {"rank": 4}),
    "topk 1 %": ("topk", {"ratio": 0.01}),
    "aligned_topk 5 %": ("aligned_topk", {}),
    "random_k 10 %": ("random_k", {"ratio": 0.1}),
    "dgc 1 %": ("dgc", {"ratio": 0.01}),
    "demo": ("demo", {}),
}
LENGTH, WIDTH, WARM_UP = 64, 256, 3


def measure(rank: int, world_size: int, send: Send, *, turns: int, block: int) -> None:
    """Trains with all schemes in the process of a rank; rank 0 sends the times of each turn."""
    # All schemes in one process, in turns: a machine that becomes slower does so for all of them.
    x = torch.randint(128, (1, LENGTH), generator=torch.Generator().manual_seed(rank))
    steps, hooks = {}, []
    for name, (scheme, options) in SCHEMES.items():
        torch.manual_seed(0)
        model = CharTransformer(LENGTH, WIDTH)
        ddp = DistributedDataParallel(model, bucket_cap_mb=4, gradient_as_bucket_view=True)
        hooks.append(commhooks.register(ddp, scheme, **options))
        steps[name] = partial(_step, ddp, x)
        seconds_per_step(steps[name], WARM_UP)
    blocks = {name: partial(seconds_per_step, step, block) for name, step in steps.items()}
    for times in in_turns(blocks, turns):
        if rank == 0:
            send(times)
    for hook in hooks:
        hook.close()


def _step(model: nn.Module, x: Tensor) -> None:
    model.zero_grad()
    model(x).square().mean().backward()


def _row(rate: str, name: str, turns: list[dict[str, float]]) -> dict[str, Any]:
    noop = statistics.median(turn[name] / turn[NOOP] for turn in turns)
    q1, base, q3 = quartiles([turn[name] / turn[BASE] for turn in turns])
    return {
        "rate": rate, "scheme": name, "over no-op": noop, "over bf16": base, "q1": q1, "q3": q3
    }  # fmt: skip


def _draw(table: pd.DataFrame, path: Path) -> None:
    mpl.use("agg")
    import matplotlib.pyplot as plt

    rates = list(table.rate.unique())
    figure, axes = plt.subplots(
        1, len(rates), figsize=(5 * len(rates), 5.5), sharey=True, squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for rate, panel in zip(rates, axes[0], strict=True):
        part = table[table.rate == rate].iloc[::-1]
        colors = ["#3b6ea5" if ratio < 1 else "#9aa1ad" for ratio in part["over bf16"]]
        panel.barh(part.scheme, part["over bf16"], color=colors, height=0.6)
        spread = [part["over bf16"] - part.q1, part.q3 - part["over bf16"]]
        panel.errorbar(part["over bf16"], part.scheme, xerr=spread, fmt="none", color="#444", lw=1)
        panel.axvline(1, color="#444", lw=0.8)
        panel.set(title=rate, xlabel="step time over bf16's (ratio)")
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(
    rates: Annotated[str, typer.Option(help="Rates of the cables, as tc writes them.")] = (
        "100mbit,1gbit,10gbit"
    ),
    turns: Annotated[int, typer.Option(help="Turns of all schemes.", min=5)] = 7,
    out: Annotated[Path, typer.Option(help="The table; the picture is beside it.")] = Path(
        "results/step_cost/schemes.csv"
    ),
) -> None:
    """Prints the table, and draws it."""
    if reason := reason_not_to_run():
        sys.exit(f"experiments.step_cost schemes: {reason}")
    rows = []
    for rate in track(rates.split(","), "rates"):
        block = 1 if rate.endswith("00mbit") else 4  # a step on a slow line takes a second
        task = {"turns": turns, "block": block}
        times = run_on_hosts(measure, task, hosts=2, rate=rate, timeout=900)
        rows += [_row(rate, name, times) for name in SCHEMES]
    _draw(printed(rows, out, digits=2), out.with_suffix(".png"))
