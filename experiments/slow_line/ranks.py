"""Runs the cells of one line in the process of a rank."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import commhooks
from commhooks.predict import ThisDevice
from experiments.slow_line.cells import Cell, Line, made, predicted_share, workload
from experiments.tools.processes import Send

__all__ = ["run_rank"]

_PIECE = 1 << 20  # entries of a parameter that move at once


class _Held(nn.Module):
    """Holds parameters of the workload's shapes."""

    def __init__(self) -> None:
        super().__init__()
        for layer in workload().layers:
            self.register_parameter(
                layer.name.replace(".", "_"), nn.Parameter(torch.zeros(layer.shape))
            )


class _Injected(torch.autograd.Function):
    """Sleeps for a layer's time in both directions; its gradient is a prepared tensor."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, parameter: Tensor, gradient: Tensor, clock: _Clock, share: float
    ) -> Tensor:
        ctx.gradient, ctx.clock, ctx.share = gradient, clock, share
        clock.work(share / 3)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        ctx.clock.work(ctx.share * 2 / 3)
        return grad, ctx.gradient, None, None, None


class _Clock:
    """Sleeps until given times, so that delays of single sleeps do not add up."""

    def __init__(self, compute_s: float) -> None:
        self.compute_s, self.due = compute_s, 0.0

    def start(self) -> None:
        self.due = time.perf_counter()

    def work(self, share: float) -> None:
        """Sleeps for a share of a step."""
        self.due += share * self.compute_s
        left = self.due - time.perf_counter()
        if left > 0:
            time.sleep(left)


class _Dense(_Held):
    """Computes by sleeping, layer by layer, so that buckets leave as in training."""

    def __init__(self, compute_s: float) -> None:
        super().__init__()
        self.clock = _Clock(compute_s)
        self.gradients = [torch.randn(layer.shape) * 1e-3 for layer in workload().layers]
        # In proportion to the entries; embeddings take a lookup only, but backward ends with them.
        self.shares = [layer.numel / workload().numel for layer in workload().layers]

    def forward(self, x: Tensor) -> Tensor:
        for parts in zip(self.parameters(), self.gradients, self.shares, strict=True):
            parameter, gradient, layer_share = parts
            x = _Injected.apply(x, parameter, gradient, self.clock, layer_share)
        return x


class _DenseRun:
    """Trains with an exchange of the gradients in every step."""

    def __init__(self, cell: Cell, compute_s: float) -> None:
        self.model = _Dense(compute_s)
        # The parameters are zeros everywhere: no broadcast, which is minutes on a slow line.
        self.ddp = DistributedDataParallel(self.model, init_sync=False)
        self.hook = commhooks.register(self.ddp, made(cell.codec))
        self.outer_s = 0.0

    def period(self) -> None:
        self.ddp.zero_grad(set_to_none=True)
        self.model.clock.start()
        self.ddp(torch.zeros(1, requires_grad=True)).sum().backward()

    def finish(self) -> None:
        self.hook.close()


class _LocalRun:
    """Trains with local steps: sleeps, moves parameters, and exchanges distances."""

    def __init__(self, cell: Cell, compute_s: float) -> None:
        self.cell, self.model, self.clock = cell, _Held(), _Clock(compute_s)
        self.outer = commhooks.DiLoCo(
            self.model, made(cell.codec), every=cell.every, delay=cell.delay
        )
        self.outer_s = 0.0
        # The outer optimizer's arithmetic is timed apart.
        for fragment in self.outer._all_fragments():
            for name in ("compute_outer_gradient", "apply"):
                setattr(fragment, name, self._timed(getattr(fragment, name)))
        # A part of the parameters moves in each step, while the rank computes.
        self.noise = torch.randn(_PIECE) * 1e-3
        pieces = [
            piece
            for parameter in self.model.parameters()
            for piece in parameter.data.view(-1).split(_PIECE)
        ]
        whole, before = sum(map(len, pieces)), 0
        self.moving: list[list[Tensor]] = [[] for _ in range(cell.every)]
        for piece in pieces:
            self.moving[before * cell.every // whole].append(piece)
            before += len(piece)

    def _timed(self, function: Callable[..., None]) -> Callable[..., None]:
        def timed(*args: Any, **options: Any) -> None:
            begin = time.perf_counter()
            function(*args, **options)
            self.outer_s += time.perf_counter() - begin

        return timed

    def period(self) -> None:
        for pieces in self.moving:
            self.clock.start()
            for piece in pieces:
                piece.add_(self.noise[: len(piece)])
            self.clock.work(1)
            self.outer.step()

    def finish(self) -> None:
        # No exchange is left on the line when the next cell begins.
        for pending in self.outer._pending:
            pending.future.wait()
        self.outer.close()


def run_rank(
    rank: int,
    world_size: int,
    send: Send,
    *,
    cells: list[tuple[str, str, int, int, int, list[int]]],
    line: list[float],
) -> None:
    """Measures cells in the process of a rank; rank 0 sends an object for each.

    Args:
        cells: plan, codec, steps of a period, periods before and with the clock, and the lengths of
            periods for which the share is predicted.
        line: the cable, as the fields of a :class:`Line`.
    """
    where = Line(*line)
    # Of its own: exchanges of DiLoCo are under way when ranks wait for each other.
    control = dist.new_group()
    device = ThisDevice("cpu")
    for plan, codec, every, before, periods, lengths in cells:
        cell = Cell(plan, codec, every)
        predicted = {
            length: predicted_share(where, replace(cell, every=length), device)
            for length in lengths
        }
        torch.manual_seed(0)
        run = (_DenseRun if plan == "ddp" else _LocalRun)(cell, where.compute_s)
        for _ in range(before):
            run.period()
        run.outer_s = 0.0
        times = []
        dist.barrier(control)
        begin = time.perf_counter()
        for _ in range(periods):
            run.period()
            times.append(time.perf_counter() - begin)
        slowest = torch.tensor(times, dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=control)
        run.finish()
        if rank == 0:
            row = {
                "plan": plan,
                "codec": codec,
                "every": every,
                "periods": periods,
                "times": slowest.tolist(),
                "predicted": predicted,
                "outer_s": run.outer_s / periods,
            }
            send(row)
        del run
