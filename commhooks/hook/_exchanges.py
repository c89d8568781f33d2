"""Describes a bucket of any host, and starts its exchange on the driver of its device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from commhooks.core._layout import Layout, Span
from commhooks.hook._coalesce import Coalescer, Group, Names
from commhooks.hook._engine import Engine
from commhooks.hook._ledger import Ledger
from commhooks.hook._target import HookTarget
from ddp_core import Clock, Drivers, Exchange, GradBucket, RoundRecord, Streams, Task, clock_of
from ddp_core._torch import version_of
from ddp_core.exchange._clocks import HOST

__all__ = [
    "ExchangeLauncher",
    "Gradient",
    "HookBucket",
    "Step",
    "gradients_of",
    "unused_parameters",
]


@dataclass(eq=False)
class HookBucket:
    """Describes a bucket of any host, as hooks exchange it.

    Attributes:
        number: index in the step, for reports; without ``origin`` the same in every step.
        gradient: flat, dense or sparse; may be overwritten.
        layout: names and shapes of the parameters, or pieces of them, in it; or a function for
            them, since many schemes never ask.
        shards: begin and end of the entries whose mean each rank needs; None: all of them.
        output: flat, takes the mean of what this rank needs; None: the gradient's own memory.
        epilogue: processes the mean, by one collective at most, before the exchange is over.
        is_blocking: whether the host waits for the mean before it does anything else.
        dense_sends: how often ``(n - 1) / n`` of the gradient would be sent without compression:
            twice in an all-reduce (also where its second half is what ``epilogue`` does), once in a
            reduce-scatter.
        frozen: names of pieces that do not get the mean, since they are frozen.
        key: two buckets of one step have different keys; by default the number.
        is_last: whether the host knows that this is the last bucket of the step.
        note: gets the rows of the ledger, too.
        origin: the bucket of DistributedDataParallel, or of a host like it, which may lay out its
            buckets again; None: the host has the same buckets in every step, and waits for each.
    """

    number: int
    gradient: Tensor
    layout: Layout | Callable[[], Layout]
    shards: Sequence[Span] | None = None
    output: Tensor | None = None
    epilogue: Callable[[Tensor], Exchange] | None = None
    is_blocking: bool = False
    dense_sends: float = 2.0
    frozen: Sequence[str] = ()
    key: Any = None
    is_last: bool = False
    note: Callable[[RoundRecord], None] | None = None
    origin: Any = None

    def __post_init__(self) -> None:
        if self.key is None:
            self.key = self.number

    @classmethod
    def of(cls, bucket: Any, target: HookTarget) -> HookBucket:
        """Returns the description of a bucket with the methods of torch's ``GradBucket``."""
        buffer, number = bucket.buffer(), bucket.index()
        # Buckets that torch rebuilds may get the address of the old ones, and ranks that take them
        # for those would add up different parameters. A weak reference keeps the storage's
        # identity.
        place = None if buffer.is_sparse else StorageWeakRef(buffer.untyped_storage())
        names = tuple(bucket.names()) if isinstance(bucket, GradBucket) else None
        return cls(
            number,
            buffer,
            lambda: target.parameters.layout(bucket.parameters()),
            key=(number, buffer.dtype, buffer.numel(), place, names),
            is_last=bucket.is_last(),
            note=getattr(bucket, "note", None),
            origin=bucket,
        )

    def find_layout(self) -> Layout:
        """Returns names and shapes of the parameters in the gradient."""
        return self.layout if isinstance(self.layout, Layout) else self.layout()

    def with_epilogue(self, exchange: Exchange) -> Exchange:
        """Runs an exchange, copies the mean to ``output`` and runs ``epilogue``."""
        mean = yield from exchange
        into = self.gradient if self.output is None else self.output
        # A scheme may return memory of its own, as ``Scaled`` does.
        if mean.data_ptr() != into.data_ptr():
            mean = into.copy_(mean)
        return mean if self.epilogue is None else (yield from self.epilogue(mean))


@dataclass(eq=False)
class Step:
    """Holds the facts of the step under way.

    Attributes:
        holds_buckets: whether buckets wait for the last bucket.
        records_times: whether times are recorded on a GPU, too.
        device, clock: device and clock of the first bucket.
        finds_unused: whether gradients of parameters that no rank uses may stay unwritten.
        core_notifies: whether ``ddp_core`` reports the end, also without a backward pass (join).
        buckets: keys of the launched buckets; an equal key is of another step.
        backward_ids: numbers of the backward passes that call back at their end.
        all_buckets_seen: whether the last bucket has come.
        in_outer_pass: whether an inner backward pass has ended; the outer may bring more buckets.
        parameters: number of parameters in the buckets so far, if ``holds_buckets``.
        entries: number of entries in the buckets so far, if exchanges may pause.
        layouts: functions that return the layouts of the dense buckets of hosts with an ``origin``.
        regrouped: the saved buckets, if the parameters were exchanged in them.
        unused: names of parameters that do not get the average, as the host says.
        gradients: parameters whose ``.grad`` may not be written, as they were at the launch.
    """

    number: int
    group: dist.ProcessGroup
    holds_buckets: bool = False
    records_times: bool = True
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    clock: Clock = HOST
    finds_unused: bool = False
    core_notifies: bool = False
    buckets: list[Any] = field(default_factory=list)
    backward_ids: set[int] = field(default_factory=set)
    all_buckets_seen: bool = False
    in_outer_pass: bool = False
    parameters: int = 0
    entries: int = 0
    layouts: list[Callable[[], Layout]] = field(default_factory=list)
    regrouped: list[Names] | None = None
    unused: set[str] = field(default_factory=set)
    gradients: list[Gradient] = field(default_factory=list)

    @property
    def ends_later(self) -> bool:
        """Whether the step ends when ``.grad`` is written, and not with its last bucket."""
        return self.core_notifies or bool(self.backward_ids)


@dataclass(slots=True)
class Gradient:
    """Holds a parameter's ``.grad`` as it was at the launch of its bucket."""

    parameter: Tensor
    version: int | None  # of ``.grad``, which every write in place raises; None: no gradient
    bucket: int  # address of the bucket's memory

    def was_skipped(self) -> bool:
        """Whether DistributedDataParallel left ``.grad`` as it was, since no rank used it."""
        # torch's class does not say, so its writes are detected (docs/design/steps.md). All
        # ranks decide the same, since torch agrees on what was used, so no message is needed.
        grad = self.parameter.grad
        if grad is None:
            return self.version is None  # else an optimizer in backward has used and dropped it
        if self.version is None or grad.is_sparse:
            return False
        # A gradient that is a view of its bucket has the average without another write.
        return version_of(grad) == self.version and grad.untyped_storage().data_ptr() != self.bucket


def gradients_of(parameters: Sequence[Tensor], buffer: Tensor) -> list[Gradient]:
    """Records the gradients of a bucket's parameters, to be compared when the step ends."""
    bucket = buffer.untyped_storage().data_ptr()
    return [
        Gradient(parameter, None if parameter.grad is None else version_of(parameter.grad), bucket)
        for parameter in parameters
    ]


def unused_parameters(step: Step) -> list[Tensor]:
    """Returns the parameters whose ``.grad`` was not written in the step."""
    return [gradient.parameter for gradient in step.gradients if gradient.was_skipped()]


# ---- what starts exchanges


Future = torch.futures.Future


class ExchangeLauncher:
    """Starts exchanges of one hook.

    Args:
        engine, drivers, ledger: the hook's parts.
    """

    def __init__(self, engine: Engine, drivers: Drivers, ledger: Ledger) -> None:
        self._engine, self._drivers, self._ledger = engine, drivers, ledger
        self._verdict_streams: dict[dist.ProcessGroup, Streams] = {}

    def start(
        self,
        step: Step,
        exchange: Exchange,
        *,
        bucket: int,
        dense_bytes: int,
        device: torch.device,
        is_last: bool,
        note: Callable[[RoundRecord], None] | None = None,
        extra_rounds: int = 0,
        is_blocking: bool = False,
        may_pause: bool = False,
        dense_sends: float = 2.0,
    ) -> Future[Tensor]:
        """Hands an exchange to the driver for its device.

        Args:
            note: gets its ledger rows, too.
            extra_rounds: collectives after those of the scheme.
            is_blocking: whether the caller waits for the future before it does anything else.
            may_pause: whether its second collective may wait for the first of the next exchange.
            dense_sends: see :class:`ddp_core.Task`.
        """
        # A new key, not the index, which two buckets of one step may share (static graphs). With
        # ``ends_later`` ``gradients_written`` commits: backward may raise after the last bucket.
        commits = is_last and not step.ends_later
        self._engine.begin_bucket(object(), is_last=commits)
        task = Task(
            exchange,
            step=step.number,
            bucket=bucket,
            dense_bytes=dense_bytes,
            world_size=self._engine.world_size,
            max_rounds=self._engine.traits.rounds + self._engine.exactly.rounds + extra_rounds,
            record=self._ledger.add if note is None else partial(_record, self._ledger, note),
            clock=clock_of(device, timed=step.records_times),
            joins=commits and self._engine.keeps_memory,
            dense_sends=dense_sends,
            # On a GPU the caller's stream waits, and what else the GPU does meanwhile is unknown.
            waited_for=is_blocking and device.type == "cpu",
        )
        return self._drivers.run(task, device, step.group, waits=is_blocking, may_pause=may_pause)

    def agree(self, step: Step, verdict_groups: Sequence[dist.ProcessGroup]) -> None:
        """Agrees on whether a step was finite where ranks have different parts of the means.

        Args:
            verdict_groups: groups of ranks that have other parts than those of the hook's group.
        """
        if self._engine.needs_agreement:
            self._agree(
                step,
                self._engine.world_size,
                partial(self._drivers.run, group=step.group, waits=True),
            )
        # Ranks with the other shards skip the same steps, where means are checked.
        for group in verdict_groups if self._engine.has_verdict else ():
            # Not by the drivers, whose lanes are of the hook's group; nothing else is under way.
            streams = self._verdict_streams.setdefault(group, Streams(group))
            self._agree(step, group.size(), streams.run)

    def _agree(
        self, step: Step, ranks: int, run: Callable[[Task, torch.device], Future[Tensor]]
    ) -> None:
        task = Task(
            self._engine.agreement(),
            step=step.number,
            bucket=len(step.buckets),
            dense_bytes=0,
            world_size=ranks,
            max_rounds=1,
            record=self._ledger.add,
            clock=clock_of(step.device, timed=step.records_times),
            joins=True,
        )
        run(task, step.device).wait()

    def start_cut(self, step: Step, bucket: HookBucket) -> Future[Tensor]:
        """Exchanges a bucket that is too large for the scheme, in parts."""
        parts = Coalescer(self._engine.traits.max_bucket_numel)
        future = parts.hold(bucket.number, bucket.gradient, bucket.find_layout)
        self.start_groups(step, parts.one_by_one(), is_last=bucket.is_last, note=bucket.note)
        return future

    def start_groups(
        self,
        step: Step,
        groups: list[Group],
        *,
        is_last: bool = True,
        note: Callable[[RoundRecord], None] | None = None,
    ) -> None:
        """Exchanges groups of parameters, which release their buckets."""
        for position, group in enumerate(groups):
            self.start(
                step,
                group.exchange(partial(self._engine.exchange, number=group.index)),
                bucket=group.index,
                dense_bytes=group.nbytes,
                device=group.device,
                is_last=is_last and position == len(groups) - 1,
                note=note,
            ).then(group.release)  # add_done_callback would not wait for CUDA streams


def _record(ledger: Ledger, note: Callable[[RoundRecord], None], row: RoundRecord) -> None:
    ledger.add(row)
    note(row)
