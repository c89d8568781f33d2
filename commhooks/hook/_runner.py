"""Runs the buckets of each step, and detects the begin and end of steps.

A step is one synchronised backward pass, and the autograd engine reports its end: the first bucket
of a pass queues a callback, which runs when all gradients have been computed; that callback queues
a second one, which runs when DistributedDataParallel has written the averages. Neither runs if
backward raises. ``ddp_core`` reports the same by name: ``backward_finished``,
``gradients_written``, ``step_aborted``. Without a backward pass (join, local steps) the last bucket
ends the step. See ``docs/design/steps.md``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from commhooks.hook._coalesce import Coalescer, Names
from commhooks.hook._engine import Engine
from commhooks.hook._exchanges import (
    ExchangeLauncher,
    HookBucket,
    Step,
    gradients_of,
    unused_parameters,
)
from commhooks.hook._ledger import Ledger
from commhooks.hook._target import HookTarget
from ddp_core import Drivers, call_after_backward, clock_of
from ddp_core._torch import backward_number, current_node

__all__ = ["Runner", "SavedLayoutReplay"]


# The step of a process from which on torch's DistributedDataParallel has rebuilt its buckets.
REBUILT_IN, STATIC_REBUILT_IN = 2, 3


class SavedLayoutReplay:
    """Replays the buckets of a saved run until DistributedDataParallel has rebuilt its own.

    Attributes:
        layout: names of the parameters of each bucket; what a state saves.
        target_layout: the layout of a loaded state while the run exchanges in it, else empty.
    """

    def __init__(self) -> None:
        self.layout: list[Names] = []
        self.target_layout: list[Names] = []
        self._layout_of: list[Any] = []  # keys of the buckets that ``layout`` describes
        self._age = 0  # steps since the start, or since a state was loaded

    def restore(self, layout: Sequence[Sequence[str]], *, regroups: bool) -> None:
        """Takes the layout of a loaded state.

        Args:
            regroups: False if the model lays out the saved buckets itself.
        """
        self.layout = [tuple(names) for names in layout]
        self.target_layout = self.layout if regroups else []
        self._age = 0

    def step_ended(self, step: Step, *, static_graph: bool) -> None:
        """Records the layout of a step that has ended."""
        self._age += 1
        # torch rebuilds the buckets of a static graph a step later.
        rebuilt = self._age >= (STATIC_REBUILT_IN if static_graph else REBUILT_IN)
        # A state has the layout of the next step, which is the loaded one while this run regroups.
        regrouped = None if rebuilt else step.regrouped
        # Layouts are looked up only if they may have changed: a look-up is work per parameter.
        if step.holds_buckets or self._age <= REBUILT_IN or step.buckets != self._layout_of:
            present = [find_layout().names for find_layout in step.layouts]
            self.layout = present if regrouped is None else regrouped
            self._layout_of = step.buckets if regrouped is None else []
        if rebuilt:
            self.target_layout = []


# ---- steps


Future = torch.futures.Future
ABORTED = "the step was aborted: its backward pass raised, or the next one began before its end"


class Runner:
    """Launches the buckets of one hook.

    Args:
        engine, drivers, ledger, target: the hook's parts.
    """

    def __init__(
        self, engine: Engine, drivers: Drivers, ledger: Ledger, target: HookTarget
    ) -> None:
        self._engine, self._drivers, self._ledger = engine, drivers, ledger
        self._target = target
        self._exchanges = ExchangeLauncher(engine, drivers, ledger)
        self.regrouping = SavedLayoutReplay()
        self._coalescer = Coalescer()
        self._step: Step | None = None
        self._outer: Runner | None = None  # of a hook that averages the means of this one further
        self._inner: Runner | None = None  # of the hook whose means this one averages further
        self._left_exchanges = False  # of an aborted step of torch's class, on a GPU's side streams
        self._threads: set[int] = set()  # ids of those that run forward and backward passes

    def start(self, bucket: HookBucket, begin: Callable[[HookBucket], Step]) -> Future[Tensor]:
        """Starts the exchange of one bucket, or holds it until the step's last bucket has come.

        Args:
            begin: returns the facts of the step that the bucket begins.
        """
        step, gradient, engine = self._enter(bucket, begin), bucket.gradient, self._engine
        if bucket.origin is not None:
            if step.finds_unused and engine.keeps_memory and not gradient.is_sparse:
                step.gradients += gradients_of(bucket.origin.parameters(), gradient)
            # Buckets of other hosts never change, so no state needs their layouts.
            if not gradient.is_sparse:
                step.layouts.append(bucket.find_layout)

        # Hold the bucket, cut it, or exchange it as it is.
        is_last = bucket.is_last
        if is_last and engine.traits.rounds > 1:  # else nothing pauses
            # A rank without input (join) commits with this bucket, and ends before it what has
            # paused. Those in a backward pass do so as well, for one order of collectives.
            self._drivers.resume()
        if step.holds_buckets:
            future = self._coalescer.hold(bucket.number, gradient, bucket.find_layout)
            # In a static graph's first step torch may mark no bucket as the last one, and waits
            # inside backward for all of them.
            step.parameters += len(bucket.origin.parameters())
            is_last = is_last or 0 < len(self._target.parameters) <= step.parameters
        elif gradient.numel() > engine.traits.max_bucket_numel:
            future = self._exchanges.start_cut(step, bucket)
        else:
            exchange = engine.exchange(
                *(gradient, bucket.layout, bucket.number),
                shards=bucket.shards,
                output=bucket.output,
            )
            if bucket.origin is None:
                step.unused.update(bucket.frozen)
                exchange = bucket.with_epilogue(exchange)
            future = self._exchanges.start(
                step,
                exchange,
                bucket=bucket.number,
                dense_bytes=gradient.numel() * gradient.element_size(),
                device=gradient.device,
                is_last=is_last,
                note=bucket.note,
                extra_rounds=int(bucket.epilogue is not None),
                is_blocking=bucket.is_blocking,
                may_pause=self._may_pause(step, bucket),
                dense_sends=bucket.dense_sends,
            )

        if is_last:
            self.backward_finished()
            if not step.ends_later:
                self._close(step)
        return future

    def backward_finished(self) -> None:
        """Starts the exchange of buckets that were held back; all buckets of the step have come."""
        step = self._step
        if step is None or step.all_buckets_seen:
            return
        step.all_buckets_seen = True  # a bucket that comes after this belongs to the next step
        if self._coalescer:
            self._exchange_held(step)
        self._drivers.resume()
        self._ledger.record_last_launch(step.number, step.clock.now())

    def gradients_written(self, unused: Iterable[Tensor] = ()) -> None:
        """Ends the step: averages are in ``.grad``, except for the parameters in ``unused``."""
        step = self._step
        if step is None:
            return
        if self._inner is not None:
            # First: its verdict takes flags of the step that ends here.
            self._inner.gradients_written()
        for runner in (self, self._outer):
            if self._engine.keeps_memory and runner is not None:
                runner._drivers.join()  # the commit reads what exchanges wrote on a GPU's streams
        self._exchanges.agree(step, self._target.verdict_groups)
        self._engine.end(step.unused.union(self._target.names(unused)))
        self._close(step)

    def chain_to(self, other: Runner) -> None:
        """Chains ``other``, which averages this hook's means further: both skip the same steps."""
        self._outer, other._inner = other, self
        self._engine.outer, other._engine.records_finite = other._engine, True

    def step_aborted(self) -> None:
        """Drops the open step after its backward pass raised."""
        self._drivers.resume()  # a peer that aborts as well does the same
        self._drop_step()

    def _drop_step(self) -> None:
        self._step = None
        self._engine.abort()
        self._coalescer.abort(ABORTED)

    def forward_begins(self) -> None:
        """Ends or drops the open step; a forward pass with gradients belongs to the next step."""
        self._threads.add(threading.get_ident())
        self.settle()
        if self._left_exchanges:
            # The next backward pass fills the same buckets. Not in ``settle``: a change of the
            # group or a checkpoint would wait for ranks that are gone.
            self._drivers.join()
            self._left_exchanges = False

    def settle(self) -> None:
        """Ends or drops a step whose backward pass is known to be over."""
        # After a pass that raised autograd runs no callback: a step that is open now was aborted.
        step = self._step
        if step is None or not step.backward_ids or backward_number() >= 0:
            return
        # The engine's current pass is a fact of one thread: a thread that saves checkpoints sees
        # none while another thread is in the middle of backward.
        if threading.get_ident() not in self._threads:
            return
        # After an inner pass (activation checkpointing) no callback is left for the outer one.
        # ``ddp_core`` reports the end itself, so there the outer pass has raised.
        if step.in_outer_pass and not step.core_notifies:
            self.gradients_written(unused_parameters(step))
            return
        # No collective: this rank may be the only one that calls this, to save a checkpoint.
        if not step.core_notifies:  # it calls ``step_aborted`` on all ranks, and waits for results
            self._drivers.drop_paused()
            self._left_exchanges = True
        self._drop_step()

    @property
    def under_way(self) -> bool:
        """Whether a step has begun and is not over."""
        self.settle()
        return self._step is not None or self._engine.under_way

    def _enter(self, bucket: HookBucket, begin: Callable[[HookBucket], Step]) -> Step:
        """Returns the step of a bucket, and queues a callback at the end of the backward pass."""
        this_pass = backward_number()
        step = self._open_for(bucket, this_pass)
        if step is None:
            step = begin(bucket)
            # A host that waits for each bucket has no other ones to join it with.
            holds = self._engine.traits.coalesce or bool(self.regrouping.target_layout)
            step.holds_buckets = holds and bucket.origin is not None
            step.records_times = self._ledger.times(step.number) or bucket.note is not None
            step.device = bucket.gradient.device
            step.clock = clock_of(step.device, timed=step.records_times)
            self._step = step
        step.buckets.append(bucket.key)
        step.in_outer_pass = False
        self._threads.add(threading.get_ident())
        # Once per pass, not per step: a reentrant pass runs its own callbacks at its own end.
        if this_pass >= 0 and this_pass not in step.backward_ids:
            step.backward_ids.add(this_pass)
            call_after_backward(partial(self._pass_ended, step))
        return step

    def _open_for(self, bucket: HookBucket, this_pass: int) -> Step | None:
        """Returns the open step if the bucket belongs to it; otherwise ends or drops that step."""
        step = self._step
        # By key, not by index or ``is_last``: all buckets of a static graph's first step have
        # index 0, and a skipped bucket may be the last one.
        if step is None or not (step.all_buckets_seen or bucket.key in step.buckets):
            return step
        goes_on = this_pass in step.backward_ids or step.in_outer_pass
        if bucket.origin is not None or step.core_notifies or not goes_on:
            self.step_aborted()
            return None
        if bucket.key not in step.buckets:
            # A model of several FSDP2 roots reduces some of their gradients in callbacks, of which
            # each root has one: some run after the first of ours, which has completed the step.
            return step
        # A module that is reduced twice in a pass, since it is called twice (docs/design/hosts.md).
        # Memory has one value a step, so the first one is committed before.
        self.gradients_written()
        return None

    def _pass_ended(self, step: Step) -> None:
        """Handles the end of a backward pass, when all its gradients have been computed."""
        if step is not self._step:  # ddp_core has ended it, or it was aborted
            return
        # After a reentrant pass the current node is the outer pass's: more buckets may come.
        nested = current_node() is not None
        if nested and not step.all_buckets_seen:
            step.in_outer_pass = True
            return
        self.backward_finished()
        # Queued behind the callback in which DistributedDataParallel writes ``.grad``.
        call_after_backward(partial(self._landed, step))

    def _landed(self, step: Step) -> None:
        if step is self._step:
            self.gradients_written(unused_parameters(step))

    def _close(self, step: Step) -> None:
        self._step = None
        self.regrouping.step_ended(step, static_graph=self._target.static_graph)

    def _may_pause(self, step: Step, bucket: HookBucket) -> bool:
        """Whether a bucket's second collective may wait for the first one of the next bucket.

        It may not if the next bucket is the last one, which it would delay. The last bucket is
        taken to be no larger than this one.
        """
        target, rounds = self._target, self._engine.traits.rounds
        if rounds == 1 or not target.launches_ahead or target.static_graph:
            return False
        numel = bucket.gradient.numel()
        step.entries += numel
        return not bucket.is_last and target.parameters.numel - step.entries > numel

    def _exchange_held(self, step: Step) -> None:
        target, coalesces = self.regrouping.target_layout, self._engine.traits.coalesce
        self._coalescer.most = self._engine.traits.max_bucket_numel
        groups = self._coalescer.groups_like(target, merged=coalesces) if target else None
        if groups is not None:
            step.regrouped = target
        else:
            groups = self._coalescer.groups() if coalesces else self._coalescer.one_by_one()
        self._exchanges.start_groups(step, groups)
