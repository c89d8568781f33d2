"""Trains one task with every scheme, in alternating blocks of steps, and measures each."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commhooks
from commhooks.optim import OneBitAdam
from experiments.tools.gradient_error import GradientError
from experiments.tools.schemes import SCHEMES, VARIANTS, Entry, gives_mean
from experiments.tools.tasks import TASKS, Task

__all__ = ["Case", "Settings", "train"]

# On the characters, the best of 3e-4, 1e-3 and 2e-3 for signs, and of 0.03, 0.1 and 0.3 for DGC.
SIGN_LR, SGD_LR = 1e-3, 0.03


def _optimizer(
    entry: Entry, task: Task, model: nn.Module, hook: commhooks.HookState | None
) -> torch.optim.Optimizer:
    """Returns the optimizer of the task, or the one that the scheme needs."""
    parameters = model.parameters()
    if entry.scheme == "onebit_adam" and hook is not None:
        return OneBitAdam(parameters, hook, lr=task.lr if task.adam else 1e-3)
    if entry.scheme in ("demo", "signsgd"):  # signs: every entry moves by the learning rate
        return torch.optim.SGD(parameters, lr=SIGN_LR)
    if entry.scheme == "dgc":  # the momentum is the hook's
        return torch.optim.SGD(parameters, lr=SGD_LR if task.adam else task.lr)
    if entry.scheme == "gossip":  # averages parameters only if the update is linear in gradients
        return torch.optim.SGD(parameters, lr=SGD_LR if task.adam else task.lr, momentum=0.9)
    return task.optimizer(model)


@dataclass(frozen=True)
class Settings:
    """Holds the settings of a run of several schemes.

    Attributes:
        task: name of the task.
        hooks: names of the schemes.
        steps: steps of each scheme, at least.
        untimed: number of first steps that are not timed: buckets are rebuilt, compression starts,
            and the error is measured.
        block: timed steps per turn; at least five turns are run.
        measures_error: whether the untimed steps are compared with exact averages.
        dense_steps: replaces the number of dense steps with which schemes start.
        seed: of models, batches and random draws.
        bucket_cap_mb: small, so that these small models have several buckets.
    """

    task: str
    hooks: Sequence[str]
    steps: int = 220
    untimed: int = 50
    block: int = 10
    measures_error: bool = True
    dense_steps: int | None = None
    seed: int = 0
    bucket_cap_mb: float = 1.0

    @property
    def turns(self) -> int:
        """Returns the number of blocks of each scheme."""
        return max((self.steps - self.untimed) // self.block, 5)

    @property
    def total_steps(self) -> int:
        """Returns the number of steps of all schemes together."""
        return (self.untimed + self.turns * self.block) * len(self.hooks)


@dataclass
class Case:
    """Holds the results of one scheme; the fields are columns of the table.

    Attributes:
        task: name of the task.
        hook: name of the scheme.
        dense_bytes: bytes of the gradient.
        dense_wire_bytes: bytes that a rank sends for a dense all-reduce of the gradient.
        payload_bytes: bytes of the payloads of a step.
        wire_bytes: bytes that a rank sends in a step.
        exposed_s: seconds of communication in a step that backward did not hide.
        window_s: seconds from the first full bucket to the last gradient of a step.
        loss, accuracy: on held-out data, at the end.
        relative_error: of the sum of averages in the watched steps, see :class:`GradientError`.
        ranks_agree: whether all ranks end with the same parameters.
        gives_mean: whether the scheme returns an average of gradients.
        losses: training loss of each step.
        block_s: seconds of a step in each turn.
    """

    task: str
    hook: str
    dense_bytes: float = 0.0
    dense_wire_bytes: float = 0.0
    payload_bytes: float = 0.0
    wire_bytes: float = 0.0
    exposed_s: float = 0.0
    window_s: float = float("nan")
    loss: float = 0.0
    accuracy: float = 0.0
    relative_error: float = float("nan")
    ranks_agree: bool = True
    gives_mean: bool = True
    losses: list[float] = field(default_factory=list)
    block_s: list[float] = field(default_factory=list)


class _Runner:
    """Trains with one scheme, on its own model, optimizer and DistributedDataParallel."""

    def __init__(self, name: str, task: Task, settings: Settings) -> None:
        torch.manual_seed(settings.seed)  # all schemes start from the same parameters
        self.name, self.task = name, task
        # torch's class: the hooks are compared as users of torch run them.
        self.ddp = DistributedDataParallel(task.model(), bucket_cap_mb=settings.bucket_cap_mb)
        self.parameters = list(self.ddp.parameters())
        self.hook: commhooks.HookState | None = None
        entry = (SCHEMES | VARIANTS)[name]
        if entry.scheme:
            options = entry.options_with(settings.dense_steps)
            self.hook = commhooks.register(self.ddp, entry.scheme, seed=settings.seed, **options)
        self.optimizer = _optimizer(entry, task, self.ddp, self.hook)
        self.outer = commhooks.DiLoCo(self.ddp, **entry.outer) if entry.outer else None
        self.step = 0
        self.block_times: list[float] = []
        self.timed_steps: set[int] = set()
        self.error = self.window = float("nan")
        self.bucket_nbytes = int(settings.bucket_cap_mb * 2**20)
        self.losses: list[float] = []

    @property
    def gives_mean(self) -> bool:
        """Whether the hook gives an average that can be compared with the exact one."""
        return self.outer is None and (self.hook is None or gives_mean(self.hook))

    def train_step(self, sums: GradientError | None = None) -> None:
        """Runs one step of training."""
        self.optimizer.zero_grad(set_to_none=True)
        x, target = self.task.batch(dist.get_rank(), self.step)
        loss = self.task.loss(self.ddp(x), target)
        loss.backward()
        if sums is not None:
            sums.step()
        self.losses.append(float(loss.detach()))
        self.optimizer.step()
        if self.outer is not None:
            self.outer.step()
        self.step += 1

    def run_untimed(self, steps: int, *, measures_error: bool) -> None:
        """Runs the first steps, and compares their averages with exact ones."""
        sums = GradientError(self.parameters, self.bucket_nbytes) if measures_error else None
        for _ in range(steps):
            self.train_step(sums)
        if sums is not None:
            sums.close()
            self.window, error = sums.window(), sums.error()
            self.error = error if self.gives_mean else float("nan")

    def run_block(self, steps: int) -> None:
        """Runs timed steps; the time of the slowest rank counts."""
        dist.barrier()  # ranks begin together: a wait for another one is no part of a step
        self.timed_steps.update(range(self.step, self.step + steps))
        begin = time.perf_counter()
        for _ in range(steps):
            self.train_step()
        elapsed = torch.tensor((time.perf_counter() - begin) / steps)
        dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
        self.block_times.append(float(elapsed))

    def result(self) -> Case:
        """Returns the results of this scheme; bytes and times are those of timed steps."""
        case = Case(self.task.name, self.name, losses=self.losses, block_s=self.block_times)
        case.relative_error, case.gives_mean = self.error, self.gives_mean
        case.window_s = self.window
        case.dense_bytes = float(sum(p.numel() * p.element_size() for p in self.parameters))
        world_size = dist.get_world_size()
        case.dense_wire_bytes = case.dense_bytes * 2 * (world_size - 1) / world_size
        if self.hook is None:  # no ledger: the formula of a ring all-reduce
            case.payload_bytes, case.wire_bytes = case.dense_bytes, case.dense_wire_bytes
            case.exposed_s = float("nan")
        else:
            # Medians: a step in which the machine was busy does not count.
            columns = ["payload_bytes", "wire_bytes", "exposed_s"]
            steps = self.hook.report().groupby("step")[columns].sum()
            steps = steps[steps.index.isin(self.timed_steps)]
            for column in columns:
                setattr(case, column, float(steps[column].median()) if len(steps) else 0.0)
        if self.outer is not None:
            # Exchanges are some steps apart, so the bytes are those of all steps over their number.
            report = self.outer.hook.report()
            for column in ("payload_bytes", "wire_bytes"):
                setattr(case, column, float(report[column].sum()) / self.step)
        case.loss, case.accuracy = self.task.evaluate(self.ddp.module)
        flat = torch.cat([parameter.detach().flatten() for parameter in self.parameters])
        # Bit for bit: a difference of the last bit grows as training continues.
        peers = [torch.empty_like(flat) for _ in range(world_size)]
        dist.all_gather(peers, flat)
        case.ranks_agree = all(torch.equal(peer, flat) for peer in peers)
        return case


def train(rank: int, world_size: int, send: Callable[[Any], None], settings: Settings) -> None:
    """Trains every scheme of ``settings`` in a process; rank 0 sends progress and results."""

    def send_progress(runner: _Runner, steps: int) -> None:
        if rank == 0:
            send({"progress": settings.task, "steps": steps, "hook": runner.name})

    task = TASKS[settings.task](world_size, seed=settings.seed)
    runners = [_Runner(name, task, settings) for name in settings.hooks]
    for runner in runners:
        runner.run_untimed(settings.untimed, measures_error=settings.measures_error)
        send_progress(runner, settings.untimed)
    for turn in range(settings.turns):
        # The order is reversed in every second turn, so that a slow drift of the machine changes
        # all schemes equally.
        for runner in runners if turn % 2 == 0 else reversed(runners):
            runner.run_block(settings.block)
            send_progress(runner, settings.block)
    for runner in runners:
        case = runner.result()
        if rank == 0:
            send({"case": asdict(case)})
        if runner.outer is not None:
            runner.outer.close()
        if runner.hook is not None:
            runner.hook.close()
