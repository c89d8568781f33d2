"""``python -m experiments.tradeoff``: error against bits, for every registered scheme.

Each scheme averages gradients of 4 pretended ranks: entries of N(0, 1), of a Laplace and of a t(3)
distribution, half of each in common to all ranks; with ``--trace``, recorded gradients too.
``error`` is |mean - exact|^2 / |exact|^2 without error feedback, the mean of some steps; ``bits``
those of an entry in an all-reduce that moves as many bytes. Schemes that give the optimizer
something else than an average (momentum, signs) are left out. A scheme is on the front if none has
both fewer bits and less error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import matplotlib as mpl
import pandas as pd
import torch
import typer
from rich.progress import track
from torch import Tensor

from commhooks import Simulation, make, scheme_names
from commhooks.cli.app import load_files
from commhooks.research.trace import Trace, bits_per_entry, replay

WORLD_SIZE, STEPS, SHAPE = 4, 3, (512, 512)
# Settings beyond the defaults, by name.
SETTINGS: dict[str, list[dict[str, object]]] = {
    "eden": [{"bits": bits} for bits in (1, 2, 3, 4)],
    "powersgd": [{"rank": rank} for rank in (1, 4, 16, 64)],
    "acpsgd": [{"rank": rank} for rank in (1, 4, 16, 64)],
    "topk": [{"ratio": ratio} for ratio in (0.001, 0.01, 0.1)],
    "random_k": [{"ratio": ratio} for ratio in (0.001, 0.01, 0.1)],
    "random_block": [{"ratio": ratio} for ratio in (0.01, 0.1)],
    "aligned_topk": [{"ratio": ratio} for ratio in (0.01, 0.1)],
    "bf16": [{}, {"stochastic": True}],
    "sdp4bit": [{"local_size": 2, "memory": False}],
    "int8": [{}, {"stochastic": False}],
    "int4": [{}, {"rotate": False}],
}
HIDDEN = {"local_size", "memory"}  # not worth a word in a label
SAME = {"drive", "none", "noop"}  # another name for what is there, or no average


def _normal(generator: torch.Generator, n: int) -> Tensor:
    return torch.randn(n, generator=generator)


def _laplace(generator: torch.Generator, n: int) -> Tensor:
    u = torch.rand(n, generator=generator, dtype=torch.float64) - 0.5
    return (-u.sign() * torch.log1p(-2 * u.abs())).float()


def _student(generator: torch.Generator, n: int) -> Tensor:
    squares = torch.randn(3, n, generator=generator).square().sum(0)
    return torch.randn(n, generator=generator) / (squares / 3).sqrt()


TAILS: dict[str, Callable[[torch.Generator, int], Tensor]] = {
    "normal": _normal,
    "Laplace": _laplace,
    "t(3)": _student,
}


def _gradients(tail: str, step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    n = SHAPE[0] * SHAPE[1]
    common = TAILS[tail](generator, n)
    return [(common + TAILS[tail](generator, n)) / 2**0.5 for _ in range(WORLD_SIZE)]


def _synthetic(name: str, options: dict[str, object]) -> Iterator[dict[str, object]]:
    for tail in TAILS:
        scheme = make(name, error_feedback=False, **options)
        ranks = Simulation(scheme, {"weight": SHAPE}, world_size=WORLD_SIZE)
        errors = []
        for step in range(1 + STEPS):
            grads = _gradients(tail, step)
            ranks.requests.clear()
            ranks.wire_bytes.clear()
            mean, exact = ranks.step(grads)[0].double(), torch.stack(grads).double().mean(0)
            if step:  # some are dense in their first
                errors.append(float((mean - exact).square().sum() / exact.square().sum()))
        bits = bits_per_entry(ranks, SHAPE[0] * SHAPE[1])
        yield {"gradients": tail, "bits": bits, "error": sum(errors) / STEPS}


def _label(name: str, options: dict[str, object]) -> str:
    return " ".join([name, *(f"{k}={v}" for k, v in options.items() if k not in HIDDEN)])


def _front(table: pd.DataFrame) -> pd.Series:
    """Whether no other row of the same gradients has fewer bits and less error."""
    on_front = []
    for row in table.itertuples():
        rivals = table[(table.gradients == row.gradients) & (table.scheme != row.scheme)]
        better = (rivals.bits <= row.bits) & (rivals.error < row.error)
        on_front.append(not better.any())
    return pd.Series(on_front, index=table.index)


def _draw(table: pd.DataFrame, path: Path) -> None:
    mpl.use("agg")
    import matplotlib.pyplot as plt

    kinds = list(table.gradients.unique())
    figure, axes = plt.subplots(
        1,
        len(kinds),
        figsize=(5.5 * len(kinds), 5.5),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for kind, panel in zip(kinds, axes[0], strict=True):
        part = table[(table.gradients == kind) & (table.error > 1e-12)].sort_values("bits")
        front = part[part.front]
        panel.plot(front.bits, front.error, color="#3b6ea5", linewidth=1, drawstyle="steps-post")
        for row in part.itertuples():
            color = "#3b6ea5" if row.front else "#9aa1ad"
            panel.plot(row.bits, row.error, "o", color=color, markersize=4)
            crowded = row.error > 0.3  # sparse and low-rank ones live on structure and feedback
            if crowded and not row.front:
                continue
            panel.annotate(
                *(row.scheme, (row.bits, row.error)),
                rotation=40 if crowded else 0,
                xytext=(4, 3) if row.front else (-4, -3),
                ha="left" if row.front else "right",
                textcoords="offset points",
                fontsize=6.5,
                color=color,
            )
        panel.set(xscale="log", yscale="log", title=kind, xlabel="bits an entry", ylim=(3e-8, 30))
        panel.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("error of the mean")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(
    trace: Annotated[Path | None, typer.Option(help="Folder of recorded gradients.")] = None,
    file: Annotated[list[Path] | None, typer.Option(help="Files with more schemes.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of the table and the picture.")] = Path(
        "results/tradeoff"
    ),
) -> None:
    """Prints the table, and draws the front."""
    load_files(file or [])
    averaging = [
        name
        for name in scheme_names()
        if name not in SAME and make(name).traits.returns != "update"
    ]
    cases = [(name, options) for name in averaging for options in SETTINGS.get(name, [{}])]
    rows: list[dict[str, object]] = []
    for name, options in track(cases, "schemes"):
        label = _label(name, options)
        rows += [{"scheme": label, **row} for row in _synthetic(name, options)]
        if trace is not None:
            found = replay(Trace(trace), name, error_feedback=False, **options)
            means = {"bits": found.bits.mean(), "error": found.error.mean()}
            rows.append({"scheme": label, "gradients": "recorded", **means})
    table = pd.DataFrame(rows)
    table["front"] = _front(table)
    for kind, part in table.groupby("gradients", sort=False):
        typer.echo(f"\n{kind}")
        shown = part.sort_values("bits")[["scheme", "bits", "error", "front"]]
        typer.echo(shown.to_string(index=False, float_format="{:.3g}".format))
    out.mkdir(parents=True, exist_ok=True)
    table.to_csv(out / "tradeoff.csv", index=False)
    _draw(table, out / "tradeoff.png")
    typer.echo(f"\nwrote {out / 'tradeoff.csv'} and .png")


if __name__ == "__main__":
    typer.run(main)
