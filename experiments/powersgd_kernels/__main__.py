"""Compares PowerSGD's arithmetic with that of torch's hook, on the matrices of real models.

Run ``python -m experiments.powersgd_kernels``: one step of one rank, rank 4, one thread, in DDP's
buckets of 25 MiB and in one bucket. ``ratio`` is the time of the other way over ours in the same
turn: the median of the turns with its quartiles.

- ``layout``: our kernels against the same products in the layout of torch's hook (rank last), with
  sums, copies and differences for the feedback as separate passes; all buffers exist beforehand.
  ``floor`` is the ratio if both are bound by memory.
- ``hook``: our scheme against torch's hook, in a process group of one.
- ``float16``: our scheme with ``wire_dtype="fp16"`` against the same without it. The cast lies
  between feedback and PowerSGD, and must not cost a pass over the gradient.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import pandas as pd
import torch
import torch.distributed as dist
import typer
from rich.progress import track
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_powersgd

from commhooks import ErrorFeedback
from commhooks.core._layout import Layout
from commhooks.hook._engine import Engine
from commhooks.kernels import (
    Matrices,
    decode_low_rank,
    multiply_left,
    multiply_right,
    orthonormalize,
    subtract_low_rank,
)
from commhooks.schemes import PowerSGD
from commhooks.wrappers import Cast
from ddp_core import simulate
from experiments.tools.tables import printed

Shapes = Sequence[tuple[int, int]]
CAPS = {"25 MiB": 25 << 20, "one": 1 << 60}


def _resnet50() -> Shapes:
    """Returns the matrices of ResNet-50; the rows of a convolution are its output channels."""
    shapes, last = [(64, 147)], 64
    for blocks, width in ((3, 64), (4, 128), (6, 256), (3, 512)):
        for block in range(blocks):
            shapes += [(width, last), (width, 9 * width), (4 * width, width)]
            if block == 0:
                shapes.append((4 * width, last))
            last = 4 * width
    return [*shapes, (1000, 2048)]


def _gpt2() -> Shapes:
    layer = [(768, 2304), (768, 768), (768, 3072), (3072, 768)]
    return [(50257, 768), (1024, 768), *(12 * layer)]


MODELS = {"ResNet-50": _resnet50(), "GPT-2": _gpt2()}
# Bytes per entry that each way has to move: torch's layout, our kernels. A cache line that is
# written is read first, unless the write bypasses the cache. Plain: M Q, M^T P, P Q^T. With
# feedback, torch's layout has separate passes for sum, copy and difference; our kernels add in the
# pass of M Q and subtract in that of P Q^T.
BYTES = {"plain": (4 + 4 + 8, 4 + 4 + 4), "feedback": (16 + 12 + 4 + 4 + 8 + 12, 12 + 4 + 12)}


def _buckets(shapes: Shapes, cap: int) -> list[Shapes]:
    """Fills buckets as DDP does: from the last matrix on, each up to ``cap`` bytes."""
    buckets: list[list[tuple[int, int]]] = [[]]
    for shape in reversed(shapes):
        size = sum(4 * rows * columns for rows, columns in [*buckets[-1], shape])
        if buckets[-1] and size > cap:
            buckets.append([])
        buckets[-1].append(shape)
    return buckets


class _Bucket:
    """Provides the methods of a bucket that torch's hook calls, and its step in two of the ways."""

    def __init__(self, index: int, shapes: Shapes, rank: int, feedback: bool) -> None:
        sizes = [rows * columns for rows, columns in shapes]
        begins = [sum(sizes[:i]) for i in range(len(sizes))]
        self.number, self.feedback = index, feedback
        self.matrices = Matrices([(b, *s, rank) for b, s in zip(begins, shapes, strict=True)])
        self.layout = Layout([f"{index}.{i}" for i in range(len(shapes))], shapes)
        self.grad, self.residual, self.spare = torch.randn(3, sum(sizes))
        self.left = torch.randn(self.matrices.left_numel)
        self.right = torch.randn(self.matrices.right_numel)
        self.p = [torch.randn(rows, rank) for rows, _ in shapes]
        self.q = [torch.randn(columns, rank) for _, columns in shapes]
        self.views = [
            part.view(shape) for part, shape in zip(self.grad.split(sizes), shapes, strict=True)
        ]

    def index(self) -> int:
        return self.number

    def is_last(self) -> bool:
        return False  # torch's hook counts steps at the last bucket, and logs

    def buffer(self) -> Tensor:
        return self.grad

    def gradients(self) -> list[Tensor]:
        return self.views

    def kernels(self) -> None:
        matrices, grad, left, right = self.matrices, self.grad, self.left, self.right
        if not self.feedback:
            multiply_right(matrices, grad, right, left)
            orthonormalize(matrices, left)
            multiply_left(matrices, grad, left, right)
            decode_low_rank(matrices, left, right, grad)
            return
        multiply_right(matrices, grad, right, left, residual=self.residual, total=grad)
        orthonormalize(matrices, left)
        multiply_left(matrices, grad, left, right)
        subtract_low_rank(matrices, grad, left, right, self.spare)
        decode_low_rank(matrices, left, right, grad)
        self.residual, self.spare = self.spare, self.residual

    def torch_layout(self) -> None:
        if self.feedback:
            self.grad.add_(self.residual)
            self.spare.copy_(self.grad)
        for matrix, p, q in zip(self.views, self.p, self.q, strict=True):
            torch.matmul(matrix, q, out=p)
            p.copy_(torch.linalg.qr(p)[0])
            torch.matmul(matrix.T, p, out=q)
        for matrix, p, q in zip(self.views, self.p, self.q, strict=True):
            torch.matmul(p, q.T, out=matrix)
        if self.feedback:
            torch.sub(self.spare, self.grad, out=self.residual)


class _Step:
    """Runs one step over all buckets of a model, in each of the five ways."""

    def __init__(self, shapes: Shapes, cap: int, rank: int, feedback: bool) -> None:
        parts = _buckets(shapes, cap)
        self.buckets = [_Bucket(i, part, rank, feedback) for i, part in enumerate(parts)]
        scheme = ErrorFeedback(PowerSGD(rank)) if feedback else PowerSGD(rank)
        self.engine = Engine(scheme, rank=0, world_size=1, seed=0)
        half = ErrorFeedback(Cast(PowerSGD(rank), torch.float16))
        self.half_engine = Engine(half, rank=0, world_size=1, seed=0)
        self.state = torch_powersgd.PowerSGDState(
            None, rank, start_powerSGD_iter=2, use_error_feedback=feedback
        )
        self.state.iter = 2

    def kernels(self) -> None:
        for bucket in self.buckets:
            bucket.kernels()

    def torch_layout(self) -> None:
        for bucket in self.buckets:
            bucket.torch_layout()

    def scheme(self, engine: Engine | None = None) -> None:
        engine = engine or self.engine
        for bucket in self.buckets:
            engine.begin_bucket(bucket.number, is_last=bucket is self.buckets[-1])
        for bucket in self.buckets:
            simulate([engine.exchange(bucket.grad, bucket.layout)])

    def scheme_in_float16(self) -> None:
        self.scheme(self.half_engine)

    def torch_hook(self) -> None:
        for bucket in self.buckets:
            torch_powersgd.powerSGD_hook(self.state, bucket).wait()


def _seconds(call: Callable[[], None]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def main(
    turns: Annotated[int, typer.Option(help="Turns per model.", min=5)] = 9,
    rank: Annotated[int, typer.Option(help="Rank of the approximation.", min=1)] = 4,
    out: Annotated[Path, typer.Option(help="The table is written there.")] = Path(
        "results/powersgd_kernels.csv"
    ),
) -> None:
    """Prints how many times faster the kernels are."""
    torch.set_num_threads(1)
    logging.getLogger(torch_powersgd.__name__).setLevel(logging.WARNING)
    # A group of one rank, which torch's hook needs: its collectives take next to no time.
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rows = []
    for model, shapes in MODELS.items():
        for kind, (bytes_of_torch, bytes_of_ours) in BYTES.items():
            for buckets, cap in CAPS.items():
                step = _Step(shapes, cap, rank, kind == "feedback")
                pairs = {
                    "layout": (step.torch_layout, step.kernels),
                    "hook": (step.torch_hook, step.scheme),
                }
                if kind == "feedback":
                    pairs["float16"] = (step.scheme_in_float16, step.scheme)
                ratios: dict[str, list[float]] = {against: [] for against in pairs}
                for turn in track(range(turns + 1), f"{model}, {kind}, {buckets}"):
                    for against, (other, kernel) in pairs.items():
                        ratio = _seconds(other) / _seconds(kernel)
                        if turn:  # the first turn touches the memory
                            ratios[against].append(ratio)
                for against, values in ratios.items():
                    q1, middle, q3 = pd.Series(values).quantile([0.25, 0.5, 0.75])
                    floor = bytes_of_torch / bytes_of_ours if against == "layout" else None
                    rows.append((model, kind, buckets, against, middle, q1, q3, floor))
    dist.destroy_process_group()
    names = ["model", "kind", "buckets", "against", "ratio", "q1", "q3", "floor"]
    table = pd.DataFrame(rows, columns=names)
    printed(table, out, digits=2)


if __name__ == "__main__":
    typer.run(main)
