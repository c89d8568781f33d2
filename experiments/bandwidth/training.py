"""Trains one task with every hook side by side, in alternating blocks, and measures each."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import commhooks
from commhooks.optim import OneBitAdam
from experiments.tasks import TASKS, Task

__all__ = ["HOOKS", "MORE_HOOKS", "WARM_UP_BLOCKS", "Case", "Settings", "train"]

WARM_UP_BLOCKS = 2  # buckets are rebuilt after the first step, and compression starts

# Name in the table -> scheme and options; None is plain DistributedDataParallel.
HOOKS: dict[str, tuple[str, dict[str, Any]] | None] = {
    "no hook": None,
    "allreduce": ("none", {}),
    "fp16": ("fp16", {}),
    "bf16": ("bf16", {}),
    "PowerSGD 1": ("powersgd", {"rank": 1}),
    "PowerSGD 2": ("powersgd", {"rank": 2}),
    "PowerSGD 4": ("powersgd", {"rank": 4}),
    "batched PowerSGD 1": ("batched_powersgd", {"rank": 1}),
    "fp16 PowerSGD 4": ("powersgd", {"rank": 4, "wire_dtype": "fp16"}),
    "no-op headroom": ("noop", {}),
    "int8": ("int8", {}),
    "int4": ("int4", {}),
    "ACP-SGD 4": ("acpsgd", {"rank": 4}),
}
# Trained by the convergence study too, which knows no time.
MORE_HOOKS: dict[str, tuple[str, dict[str, Any]] | None] = {
    "fp8": ("fp8", {}),
    "mxfp8": ("mxfp8", {}),
    "1-bit": ("onebit", {}),
    "EDEN, 1 bit": ("eden", {"bits": 1}),
    "EDEN, 2 bits": ("eden", {"bits": 2}),
    "QSGD": ("qsgd", {}),
    "TernGrad": ("terngrad", {}),
    "top-k 1 %": ("topk", {"ratio": 0.01}),
    "top-k 10 %": ("topk", {"ratio": 0.1}),
    "random-k 10 %": ("random_k", {"ratio": 0.1}),
    "random block 10 %": ("random_block", {"ratio": 0.1}),
    "aligned top-k 10 %": ("aligned_topk", {"ratio": 0.1, "row": 64}),
    "bf16, stochastic": ("bf16", {"stochastic": True}),
    "SDP4Bit": ("sdp4bit", {}),
    "Global-QSGD": ("global_qsgd", {}),
    "IntSGD": ("intsgd", {}),
    "1-bit Adam": ("onebit_adam", {"freeze_step": 40}),
    "DeMo": ("demo", {}),
    "DGC 1 %": ("dgc", {"ratio": 0.01, "warmup_steps": 40, "sampled": False}),
    "signSGD": ("signsgd", {}),
    "DiLoCo, every 11, int4": ("noop", {}),
}
OUTER = {"DiLoCo, every 11, int4": {"scheme": "int4", "every": 11}}


def _optimizer(
    name: str, task: Task, model: nn.Module, hook: commhooks.HookState | None
) -> torch.optim.Optimizer:
    """The task's, or what belongs to the scheme."""
    if name == "1-bit Adam" and hook is not None:
        return OneBitAdam(model.parameters(), hook, lr=task.lr if task.adam else 1e-3)
    if name in ("DeMo", "signSGD"):  # signs: every entry moves by the learning rate
        return torch.optim.SGD(model.parameters(), lr=SIGN_LR)
    if name.startswith("DGC"):  # the momentum is the hook's
        return torch.optim.SGD(model.parameters(), lr=DGC_LR if task.adam else task.lr)
    return task.optimizer(model)


# The best for DeMo of 3e-4, 1e-3, 2e-3, and for DGC of 0.03, 0.1, 0.3, on the characters.
SIGN_LR, DGC_LR = 1e-3, 0.03


@dataclass(frozen=True)
class Settings:
    """How long, with what seed, and which hooks.

    Attributes:
        block: timed steps of a turn; a step that measures the error goes before them.
        start_step: PowerSGD sends dense gradients before it.
        bucket_cap_mb: small, so that these small models have several buckets.
    """

    task: str
    hooks: Sequence[str]
    steps: int = 220
    block: int = 10
    start_step: int = 10
    seed: int = 0
    bucket_cap_mb: float = 1.0

    @property
    def turns(self) -> int:
        """Blocks that each hook runs; at least five are counted."""
        return max(self.steps // (self.block + 1), WARM_UP_BLOCKS + 5)

    @property
    def total_steps(self) -> int:
        """Steps of all hooks together."""
        return self.turns * (self.block + 1) * len(self.hooks)


@dataclass
class Case:
    """What one hook gave; the fields are the columns of the table."""

    task: str
    hook: str
    dense_bytes: float = 0.0
    payload_bytes: float = 0.0
    wire_bytes: float = 0.0
    exposed_s: float = 0.0
    loss: float = 0.0
    accuracy: float = 0.0
    relative_error: float = 0.0
    ranks_agree: bool = True
    losses: list[float] = field(default_factory=list)
    block_s: list[float] = field(default_factory=list)


class _Runner:
    """One hook: its own model, optimizer and DistributedDataParallel."""

    def __init__(self, name: str, task: Task, settings: Settings) -> None:
        torch.manual_seed(settings.seed)
        self.name, self.task = name, task
        self.ddp = DistributedDataParallel(task.model(), bucket_cap_mb=settings.bucket_cap_mb)
        self.parameters = list(self.ddp.parameters())
        self.hook: commhooks.HookState | None = None
        chosen = (HOOKS | MORE_HOOKS)[name]
        if chosen is not None:
            scheme, options = chosen
            if "powersgd" in scheme:
                options = {**options, "start_step": settings.start_step}
            self.hook = commhooks.register(self.ddp, scheme, seed=settings.seed, **options)
        self.optimizer = _optimizer(name, task, self.ddp, self.hook)
        self.outer = commhooks.DiLoCo(self.ddp, **OUTER[name]) if name in OUTER else None
        self.step = 0
        self.block_times: list[float] = []
        self.timed_steps: set[int] = set()
        self.errors: list[float] = []
        self.losses: list[float] = []

    def gradients(self, *, sync: bool) -> Tensor:
        """Flat gradient of this step's batch: averaged by the hook, or local."""
        self.optimizer.zero_grad(set_to_none=True)
        x, target = self.task.batch(dist.get_rank(), self.step)
        with nullcontext() if sync else self.ddp.no_sync():
            loss = self.task.loss(self.ddp(x), target)
            loss.backward()
        if sync:
            self.losses.append(float(loss.detach()))
            return torch.empty(0)
        return torch.cat([parameter.grad.flatten() for parameter in self.parameters])

    def train_step(self) -> None:
        """One ordinary step."""
        self.gradients(sync=True)
        self._update()

    def _update(self) -> None:
        self.optimizer.step()
        if self.outer is not None:
            self.outer.step()
        self.step += 1

    def probe_step(self) -> None:
        """A step that also compares the hook's average with the exact mean; not timed."""
        exact = self.gradients(sync=False).double()
        dist.all_reduce(exact)
        exact /= dist.get_world_size()
        self.gradients(sync=True)
        averaged = torch.cat([parameter.grad.flatten() for parameter in self.parameters])
        self.errors.append(float((averaged.double() - exact).norm() / exact.norm()))
        self._update()

    def run_block(self, steps: int) -> None:
        """A probe step, then ``steps`` timed ones; the slowest rank's time counts."""
        self.probe_step()
        dist.barrier()
        self.timed_steps.update(range(self.step, self.step + steps))
        begin = time.perf_counter()
        for _ in range(steps):
            self.train_step()
        elapsed = torch.tensor((time.perf_counter() - begin) / steps)
        dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
        self.block_times.append(float(elapsed))

    def result(self, start_step: int) -> Case:
        """What this hook gave; bytes and times of compressed and timed steps only."""
        case = Case(self.task.name, self.name, losses=self.losses)
        case.block_s = self.block_times[WARM_UP_BLOCKS:]
        case.relative_error = statistics.median(self.errors[WARM_UP_BLOCKS:])
        case.dense_bytes = float(sum(p.numel() * p.element_size() for p in self.parameters))
        world_size = dist.get_world_size()
        if self.hook is None:
            case.payload_bytes = case.dense_bytes  # no ledger: by the formula of an all-reduce
            case.wire_bytes = case.dense_bytes * 2 * (world_size - 1) / world_size
            case.exposed_s = float("nan")
        else:
            steps = (
                self.hook.report()
                .groupby("step")[["payload_bytes", "wire_bytes", "exposed_s"]]
                .sum()
            )
            steps = steps[(steps.index >= start_step) & steps.index.isin(self.timed_steps)]
            for column in ("payload_bytes", "wire_bytes", "exposed_s"):
                value = float(steps[column].median()) if len(steps) else 0.0
                setattr(case, column, value)
        if self.outer is not None:
            report = self.outer.hook.report()
            for column in ("payload_bytes", "wire_bytes"):
                setattr(case, column, float(report[column].sum()) / self.step)
        model = self.ddp.module
        case.loss, case.accuracy = self.task.evaluate(model)
        flat = torch.cat([parameter.detach().flatten() for parameter in self.parameters])
        peers = [torch.empty_like(flat) for _ in range(world_size)]
        dist.all_gather(peers, flat)
        case.ranks_agree = all(torch.equal(peer, flat) for peer in peers)
        return case


def train(rank: int, world_size: int, send: Callable[[Any], None], settings: Settings) -> None:
    """One process: every hook of ``settings`` on one task; rank 0 sends progress and results."""
    task = TASKS[settings.task](world_size, seed=settings.seed)
    runners = [_Runner(name, task, settings) for name in settings.hooks]
    for turn in range(settings.turns):
        # The order turns around each time, so that slow drift of the machine hits all alike.
        for runner in runners if turn % 2 == 0 else reversed(runners):
            runner.run_block(settings.block)
            if rank == 0:
                send({"progress": settings.task, "steps": settings.block + 1, "hook": runner.name})
    for runner in runners:
        case = runner.result(settings.start_step)
        if rank == 0:
            send({"case": asdict(case)})
        if runner.outer is not None:
            runner.outer.close()
        if runner.hook is not None:
            runner.hook.close()
