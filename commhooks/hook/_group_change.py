"""Moves a running hook to another process group, with the memory of its scheme.

Memory is carried over by the rules of a checkpoint that is loaded on another number of ranks
(:mod:`commhooks.checkpoint._ranks`), with one difference: residuals are not sent, since each rank
keeps its own. See ``docs/design/hosts.md``.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from commhooks.checkpoint._format import MemoryDict, Part, SavedBuckets
from commhooks.checkpoint._ranks import merged, resizes_of
from commhooks.core._scheme import slots_of, walk
from commhooks.errors import RegistrationError
from commhooks.hook._handshake import handshake
from commhooks.hook._running import CLOSED, Running
from commhooks.hook._saving import gather_states
from commhooks.wrappers._feedback import unwrap_flush
from commhooks.wrappers._make import describe

__all__ = ["GroupChange", "change_group"]

CALL = "HookState.change_group"
_FAULT = "what keeps it from changing"
_EQUAL = ("scheme and options", "commhooks version", "torch version", "parameters")


class GroupChange(NamedTuple):
    """Describes a change of a hook's ranks; ranks are those of the new group.

    Attributes:
        step: number of the next step.
        before, world_size: number of ranks before and now.
        source: the rank whose step, seed and shared values all ranks have taken.
        joined: ranks that came without memory of this run.
        stale_ranks: ranks that had not ended the last step; they continue from the source's step.
        lost: number of ranks that are gone, with their memory.
        dropped: keys of this rank's memory that cannot be carried over to other ranks.
    """

    step: int
    before: int
    world_size: int
    source: int
    joined: tuple[int, ...] = ()
    stale_ranks: tuple[int, ...] = ()
    lost: int = 0
    dropped: tuple[str, ...] = ()

    def __str__(self) -> str:
        text = f"before step {self.step}: {self.before} ranks became {self.world_size}"
        if self.joined:
            text += f"; joined: {list(self.joined)}"
        if self.lost:
            text += f"; lost, with what they kept: {self.lost}"
        if self.stale_ranks:
            text += f"; had not ended the last step: {list(self.stale_ranks)}"
        return text + (f"; dropped: {list(self.dropped)}" if self.dropped else "")


class _RankReport(NamedTuple):
    """Holds the state of one rank before the change."""

    run: tuple[str, str]
    step: int
    rank: int
    world_size: int
    plan: str
    scheme: str


def change_group(hook: Running, group: dist.ProcessGroup) -> GroupChange:
    """Implements ``HookState.change_group``; the model moves after the hook."""
    fault = _reason_against_change(hook)
    hook.bind()  # a hook that has never run may not know its model
    # First: nothing below needs the former ranks, which may be gone.
    if not fault:
        hook.drivers.abort()
        hook.runner.step_aborted()
        if hook.verification is not None:
            hook.verification.abort()
    # Which buckets pause depends on layers that were unfrozen, of which other ranks may not know.
    hook.target.launches_ahead = False

    # Compare the ranks, and agree on the source of shared values.
    engine = hook.engine
    this_rank = _RankReport(
        hook._run_ids,
        engine.step,
        max(engine.rank, 0),
        max(engine.world_size, 1),
        hook.plan_state(),
        describe(unwrap_flush(hook.scheme)),
    )
    with hook.target.on_device():
        ranks = [
            _RankReport(*fields)
            for fields in handshake(CALL, {_FAULT: fault}, group, message=tuple(this_rank))
        ]
        if fault:
            raise RegistrationError(f"{CALL}: {fault}")
        source, stayed = _surviving_ranks(ranks)
        hook.apply_plan(ranks[source].plan, ranks[source].scheme)
        change = _describe(ranks, source, stayed)

        # Exchange the memory that is shared or averaged. The order of ranks does not matter.
        ranks_change = bool(change.joined or change.lost or change.before != change.world_size)
        if ranks_change:
            change = change._replace(dropped=_dropped(hook))
        received = _exchange(hook, group, change, stayed, carries_over=ranks_change)

    # From here on nothing fails: change memory, counters and group.
    if ranks_change:
        _carry_over(hook, group.rank(), change, this_rank.world_size, stayed, received)
    elif change.stale_ranks:
        memory = {**_own_memory(hook), **received[source]["memory"]}
        engine.memory.load(memory)
    _resume(hook, group, received[source], ranks[source], change)
    return change


def _reason_against_change(hook: Running) -> str:
    """Returns the reason why a hook cannot change its ranks now; empty if it can."""
    if hook._closed:
        return CLOSED
    if hook.fixed_group_reason:
        return hook.fixed_group_reason
    # A step whose backward pass raised is over, and one without a backward pass (DiLoCo) is given
    # up: its exchange may wait for ranks that are gone.
    hook.runner.settle()
    step = hook.runner._step
    if step is not None and step.backward_ids:
        return (
            f"step {hook.step} is under way; change the ranks between two steps, after "
            f"loss.backward() has returned or raised"
        )
    return ""


def _surviving_ranks(ranks: Sequence[_RankReport]) -> tuple[int, list[int]]:
    """Returns the source of shared values, and the ranks that have memory of the same run."""

    def same_run(of: _RankReport) -> list[int]:
        # The run before as well: a rank may have missed the end of a change that was broken off.
        names = set(of.run) - {""}
        return [rank for rank, report in enumerate(ranks) if names & set(report.run)]

    # The run that most ranks come from, not the largest step: a rank that joins may have loaded a
    # state of any step.
    places = range(len(ranks))
    source = max(
        places,
        key=lambda rank: (
            len(same_run(ranks[rank])),
            ranks[rank].world_size,
            ranks[rank].step,
            -rank,
        ),
    )
    # Steps end on all ranks but those whose last step was cut off. A rank that is further behind
    # was away meanwhile, and what it kept was counted as lost then.
    last = max([ranks[rank].step for rank in same_run(ranks[source])], default=ranks[source].step)
    stayed = [rank for rank in same_run(ranks[source]) if ranks[rank].step >= last - 1]
    if not stayed:
        return source, [source]
    return max(stayed, key=lambda rank: (ranks[rank].step, -rank)), stayed


def _describe(ranks: Sequence[_RankReport], source: int, stayed: Sequence[int]) -> GroupChange:
    first = ranks[source]
    joined = tuple(rank for rank in range(len(ranks)) if rank not in stayed)
    known = {ranks[rank].rank for rank in stayed if ranks[rank].run == first.run}
    from_other_runs = sum(ranks[rank].run != first.run for rank in stayed)
    lost = max(0, first.world_size - len(known) - from_other_runs)
    return GroupChange(
        first.step,
        first.world_size,
        len(ranks),
        source,
        joined,
        tuple(rank for rank in stayed if ranks[rank].step != first.step),
        lost,
    )


def _dropped(hook: Running) -> tuple[str, ...]:
    drops = {key for key, resize in resizes_of(hook.scheme).items() if resize == "drop"}
    return tuple(sorted(drops & set(_own_memory(hook))))


def _own_memory(hook: Running) -> MemoryDict:
    """Returns this rank's memory by key and name, without copies."""
    values: MemoryDict = {}
    for key, name, value in hook.engine.memory.items():
        values.setdefault(key, {})[name] = value
    return values


def _exchange(
    hook: Running,
    group: dist.ProcessGroup,
    change: GroupChange,
    stayed: Sequence[int],
    *,
    carries_over: bool,
) -> list[dict[str, Any]]:
    """Gathers the run's facts, and the memory that is shared or averaged, from all ranks."""
    rank, resizes = group.rank(), resizes_of(hook.scheme)
    memory_here = _own_memory(hook) if rank in stayed else {}
    sent = {key for key in memory_here if carries_over and resizes.get(key) == "mean"}
    part: dict[str, Any] = {}
    if rank == change.source:
        if change.joined or change.stale_ranks:
            sent |= {key for key in memory_here if key not in resizes}
        core = hook.target.notifying_core(hook)
        layout = hook.continuation.saved(None).layout if core is None else ()
        part = {
            "run": uuid.uuid4().hex,
            "seed": hook.engine.seed,
            "layout": [list(names) for names in layout],
            "regroups": bool(hook.runner.regrouping.target_layout),
        }
    facts = {key: value for key, value in hook._facts(hook.scheme).items() if key in _EQUAL}
    facts["environment"] = [
        fact for inside in walk(hook.scheme) for fact in inside.environment(group.size())
    ]
    memory = {key: memory_here[key] for key in sorted(sent)}
    # Facts are compared first: from here on all ranks change, or none does.
    whole = gather_states(
        CALL, {**facts, f"rank{rank}": {**part, "memory": memory}}, None, group, None
    )
    return [whole[f"rank{number}"] for number in range(group.size())]


def _carry_over(
    hook: Running,
    rank: int,
    change: GroupChange,
    saved_size: int,
    stayed: Sequence[int],
    received: Sequence[dict[str, Any]],
) -> None:
    """Replaces the memory by this rank's share of the memory of the surviving ranks."""
    resizes = resizes_of(hook.scheme)
    shared = set(received[change.source]["memory"]) - set(resizes)
    parts = []
    for number in stayed:
        memory = dict(received[number]["memory"])
        if number == rank:
            present = _own_memory(hook)
            memory |= {
                key: present[key] for key in present if key not in shared and key not in memory
            }
        parts.append(Part(number, number, 0, memory))
    memory = merged(parts, rank, saved_size, change.world_size, resizes)
    if change.lost:
        # The mean over those that are left is not the mean that all have added up before.
        for slot in slots_of(hook.scheme):
            if slot.mean_key is not None and slot.mean_key in memory:
                memory[slot.key] = {n: value.clone() for n, value in memory[slot.mean_key].items()}
    hook.engine.memory.load(memory)


def _resume(
    hook: Running,
    group: dist.ProcessGroup,
    given: dict[str, Any],
    source: _RankReport,
    change: GroupChange,
) -> None:
    """Takes step, seed and layout of the source, and compares facts as in the first step."""
    engine, continuation = hook.engine, hook.continuation
    engine.rank, engine.world_size = group.rank(), group.size()
    engine.step, engine.seed = source.step, given["seed"]
    hook.ledger.rewind(engine.step)
    hook._run_ids = (given["run"], source.run[0])
    hook.target.pickled_on = None
    # ``ddp_core`` lays its buckets out again. Torch's class begins with its former buckets, which
    # a rank that joins does not have: all ranks exchange in those of the source until torch has
    # rebuilt its own.
    is_core = hook.target.notifying_core(hook) is not None
    regroups = not is_core and bool(change.joined or change.stale_ranks or given["regroups"])
    continuation.loaded = SavedBuckets(given["layout"] if regroups else ())
    continuation.buckets_restored = not regroups
    hook.runner.regrouping.restore(given["layout"], regroups=regroups)
    hook.agreed = False
    hook.target.change_group(group)
    hook.agree(CALL)
    # The ranks have just compared: none does so again in its next step, a new one neither.
    hook._compared_in_step = True
    hook.on_group_changed()
