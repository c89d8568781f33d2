"""``python -m experiments.powersgd_kernels``: PowerSGD's arithmetic on the matrices of real models.

One step of one rank, rank 4, one thread: what the kernels take, with feedback inside the first
product, against the layout of torch's hook (thin operands with rank as their last dimension, a copy
for the feedback, sums and differences apart). ``ratio`` is the hook's time over the kernels',
median of the turns with its quartiles; ``floor`` is what it would be if both were bound by memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import pandas as pd
import torch
import typer
from rich.progress import track

from commhooks.kernels import (
    Matrices,
    decode_low_rank,
    multiply_left,
    multiply_right,
    orthonormalize,
    subtract_low_rank,
)

Shapes = list[tuple[int, int]]


def _resnet50() -> Shapes:
    """Of convolutions, rows are output channels."""
    found, last = [(64, 147)], 64
    for blocks, width in ((3, 64), (4, 128), (6, 256), (3, 512)):
        for block in range(blocks):
            found += [(width, last), (width, 9 * width), (4 * width, width)]
            if block == 0:
                found.append((4 * width, last))
            last = 4 * width
    return [*found, (1000, 2048)]


def _gpt2() -> Shapes:
    layer = [(768, 2304), (768, 768), (768, 3072), (3072, 768)]
    return [(50257, 768), (1024, 768), *(12 * layer)]


MODELS = {"ResNet-50": _resnet50(), "GPT-2": _gpt2()}
# Bytes an entry that each way must move; what is written is read first, but where the cache is
# passed by. Plain: M Q, M^T P, P Q^T. With feedback: sum, copy, these, difference; fused:
# M Q with the sum in it, M^T P, the difference, P Q^T.
BYTES = {"plain": (4 + 4 + 8, 4 + 4 + 4), "feedback": (16 + 12 + 4 + 4 + 8 + 12, 16 + 4 + 8 + 4)}


class _Step:
    """The two ways to do a step on one set of matrices, whose buffers they share."""

    def __init__(self, shapes: Shapes, rank: int) -> None:
        sizes = [rows * columns for rows, columns in shapes]
        begins = [sum(sizes[:i]) for i in range(len(sizes))]
        self.matrices = Matrices([(b, *s, rank) for b, s in zip(begins, shapes, strict=True)])
        self.grad, self.residual, self.total, self.mean = torch.randn(4, sum(sizes))
        self.left = torch.randn(self.matrices.left_numel)
        self.right = torch.randn(self.matrices.right_numel)
        self.p = [torch.randn(rows, rank) for rows, _ in shapes]
        self.q = [torch.randn(columns, rank) for _, columns in shapes]
        self.views = {
            name: [part.view(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)]
            for name, flat in (("grad", self.grad), ("total", self.total), ("mean", self.mean))
        }

    def kernels(self, feedback: bool) -> None:
        add = {"residual": self.residual, "total": self.total} if feedback else {}
        source = self.total if feedback else self.grad
        multiply_right(self.matrices, self.grad, self.right, self.left, **add)
        orthonormalize(self.matrices, self.left)
        multiply_left(self.matrices, source, self.left, self.right)
        if feedback:
            subtract_low_rank(self.matrices, self.left, self.right, self.total)
        decode_low_rank(self.matrices, self.left, self.right, self.mean)

    def hook(self, feedback: bool) -> None:
        name = "total" if feedback else "grad"
        if feedback:
            torch.add(self.grad, self.residual, out=self.total)
            before = self.total.clone()
        for matrix, p, q in zip(self.views[name], self.p, self.q, strict=True):
            torch.matmul(matrix, q, out=p)
            p.copy_(torch.linalg.qr(p)[0])
            torch.matmul(matrix.T, p, out=q)
        for matrix, p, q in zip(self.views["mean"], self.p, self.q, strict=True):
            torch.matmul(p, q.T, out=matrix)
        if feedback:
            torch.sub(before, self.mean, out=self.total)


def _seconds(call: Callable[[bool], None], feedback: bool) -> float:
    begin = time.perf_counter()
    call(feedback)
    return time.perf_counter() - begin


def main(
    turns: Annotated[int, typer.Option(help="Turns per model.", min=5)] = 9,
    rank: Annotated[int, typer.Option(help="Of the approximation.", min=1)] = 4,
    out: Annotated[Path, typer.Option(help="The table is written there.")] = Path(
        "results/powersgd_kernels.csv"
    ),
) -> None:
    """Prints how many times faster the kernels are."""
    torch.set_num_threads(1)
    rows = []
    for model, shapes in MODELS.items():
        step = _Step(shapes, rank)
        for kind in ("plain", "feedback"):
            feedback = kind == "feedback"
            ratios = []
            for turn in track(range(turns + 1), description=f"{model}, {kind}"):
                ratio = _seconds(step.hook, feedback) / _seconds(step.kernels, feedback)
                if turn:  # the first touches the memory
                    ratios.append(ratio)
            q1, middle, q3 = pd.Series(ratios).quantile([0.25, 0.5, 0.75])
            theirs, ours = BYTES[kind]
            row = {"model": model, "kind": kind, "ratio": middle, "q1": q1, "q3": q3}
            rows.append(row | {"floor": theirs / ours})
    table = pd.DataFrame(rows)
    typer.echo(table.to_string(index=False, float_format="{:.2f}".format))
    out.parent.mkdir(parents=True, exist_ok=True)
    table.to_csv(out, index=False)
    typer.echo(f"wrote {out}")


if __name__ == "__main__":
    typer.run(main)
