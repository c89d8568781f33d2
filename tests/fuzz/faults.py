"""Bugs that can be planted in the ranks, to see that the fuzzer finds them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import commhooks
import ddp_core
from commhooks.collectives import _functions as functions
from commhooks.collectives._calls import CollectiveState
from commhooks.core._dense import Dense
from commhooks.core._memory import Memory
from commhooks.core._scheme import Bucket
from commhooks.fsdp import _fsdp1 as fsdp1
from commhooks.fsdp._fsdp2 import ReplicaAllReduce, SchemeReduceScatter
from commhooks.hook import _state as _state
from commhooks.hook._engine import Engine
from commhooks.hosts._process_group import SchemeGroup
from commhooks.local import _diloco as diloco
from ddp_core.ddp._forward import ShadowHook
from ddp_core.reducer._buckets import FlatBucket
from ddp_core.reducer._unused import UsedMap

__all__ = ["BUGS", "planted"]

Patch = tuple[Any, str, Any]
BUGS: dict[str, Callable[[int], Patch]] = {}


def _bug(plant: Callable[[int], Patch]) -> Callable[[int], Patch]:
    BUGS[plant.__name__.lstrip("_")] = plant
    return plant


@contextmanager
def planted(name: str, rank: int) -> Iterator[None]:
    """The bug is there inside; no name, no bug."""
    if not name:
        yield
        return
    owner, attribute, value = BUGS[name](rank)
    with mock.patch.object(owner, attribute, value):
        yield


@_bug
def _residual_dropped(rank: int) -> Patch:
    write = Memory.write

    def forgetful(self: Memory, key: str, layout: Any, flat: Any) -> None:
        write(self, key, layout, flat.zero_() if key == "residual" and flat is not None else flat)

    return Memory, "write", forgetful


@_bug
def _residual_two_percent_off(rank: int) -> Patch:
    write = Memory.write

    def sloppy(self: Memory, key: str, layout: Any, flat: Any) -> None:
        write(
            self, key, layout, flat.mul_(0.98) if key == "residual" and flat is not None else flat
        )

    return Memory, "write", sloppy


@_bug
def _step_never_ends(rank: int) -> Patch:
    return Engine, "_settle", lambda self, step: None


@_bug
def _draw_differs_by_rank(rank: int) -> Patch:
    draw = Bucket.random

    def own(self: Bucket, purpose: str, *, shared: bool) -> Any:
        return draw(self, f"{purpose}{self.rank}", shared=shared)

    return Bucket, "random", own


@_bug
def _mean_over_one_rank_less(rank: int) -> Patch:
    issue = ddp_core.AllReduce.issue

    def wrong(self: Any, group: Any) -> Any:
        if self.op == "mean" and group.size() > 2:
            self.tensor.mul_(group.size() / (group.size() - 1))
        return issue(self, group)

    return ddp_core.AllReduce, "issue", wrong


@_bug
def _bad_step_is_kept(rank: int) -> Patch:
    commit = Memory.commit

    def trusting(self: Memory, good: torch.Tensor, *rest: Any) -> None:
        commit(self, torch.ones_like(good), *rest)

    return Memory, "commit", trusting


@_bug
def _raised_step_is_kept(rank: int) -> Patch:
    return Engine, "abandon", Engine.end


@_bug
def _switch_forgets_residual(rank: int) -> Patch:
    switch = _state.HookState.switch

    def forgetful(self: Any, *scheme: Any, **options: Any) -> None:
        switch(self, *scheme, **options)
        self.engine.memory.drop("residual")

    return _state.HookState, "switch", forgetful


@_bug
def _load_takes_rank_zeros(rank: int) -> Patch:
    load = _state.HookState.load_state_dict

    def careless(self: Any, state: Any, **options: Any) -> None:
        if isinstance(state, dict):
            local = f"rank{self.rank}"
            values: list[Any] = [None] * self.world_size
            dist.all_gather_object(values, state[local]["memory"], group=self._group())
            state = {**state, local: {"rank": self.rank, "memory": values[0]}}
        load(self, state, **options)

    return _state.HookState, "load_state_dict", careless


@_bug
def _unused_are_overwritten(rank: int) -> Patch:
    return UsedMap, "globally_unused", lambda self, members: None


@_bug
def _small_gradients_of_rank_one_count_half(rank: int) -> Patch:
    fill = FlatBucket.fill
    factor = 0.5 if rank == 1 else 1.0

    def hasty(self: FlatBucket, gradients: Any, divisor: Any) -> None:
        fill(self, [None if g is None else g * factor for g in gradients], divisor)

    return FlatBucket, "fill", hasty


@_bug
def _one_rank_waits(rank: int) -> Patch:
    start = _state.HookState.start

    def skipping(self: Any, bucket: Any) -> Any:
        if rank == 1 and self.step == 1:
            future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            return future  # nobody completes it
        return start(self, bucket)

    return _state.HookState, "start", skipping


@_bug
def _joined_rank_keeps_its_model(rank: int) -> Patch:
    return ShadowHook, "post_hook", lambda self, is_last_joiner: None


@_bug
def _feedback_is_off(rank: int) -> Patch:
    exchange = commhooks.ErrorFeedback.exchange

    def without(self: Any, bucket: Any) -> Any:
        if bucket.step % 2:
            return (yield from self.scheme.exchange(bucket))
        return (yield from exchange(self, bucket))

    return commhooks.ErrorFeedback, "exchange", without


# ---- on other hosts, and in what goes between ranks


@_bug
def _small_gradients_are_lost(rank: int) -> Patch:
    exchange = Dense.exchange

    def coarse(self: Dense, bucket: Any) -> Any:
        raw = bucket.raw
        raw[raw.abs() < 1e-4 * raw.abs().max()] = 0
        return exchange(self, bucket)

    return Dense, "exchange", coarse


@_bug
def _host_forgets_to_divide(rank: int) -> Patch:
    call = SchemeReduceScatter.__call__

    def sums(self: Any, output_tensor: Any, **options: Any) -> None:
        call(self, output_tensor, **options)
        output_tensor.mul_(options["group"].size())

    return SchemeReduceScatter, "__call__", sums


@_bug
def _shard_of_another_rank(rank: int) -> Patch:
    call = SchemeReduceScatter.__call__

    def turned(self: Any, output_tensor: Any, input_tensor: Any, **options: Any) -> None:
        parts = input_tensor.view(options["group"].size(), -1).roll(1, 0)
        call(self, output_tensor, parts.view(-1), **options)

    return SchemeReduceScatter, "__call__", turned


@_bug
def _what_comes_from_other_nodes_is_lost(rank: int) -> Patch:
    call = ReplicaAllReduce.__call__
    return ReplicaAllReduce, "__call__", lambda self, reduced: call(self, reduced.clone())


@_bug
def _all_ranks_are_replicas(rank: int) -> Patch:
    issue = ddp_core.AllReduce.issue
    return ddp_core.AllReduce, "issue", lambda self, group: issue(self, dist.group.WORLD)


@_bug
def _a_group_gives_the_mean_for_a_sum(rank: int) -> Patch:
    run = SchemeGroup._run
    return SchemeGroup, "_run", lambda self, tensor, op: run(self, tensor, dist.ReduceOp.AVG)


@_bug
def _collectives_sum_for_a_mean(rank: int) -> Patch:
    return functions, "sums", lambda kind, op: True


@_bug
def _names_share_what_they_keep(rank: int) -> Patch:
    return CollectiveState, "_named", lambda self, call, name: str(tuple(call.input.shape))


@_bug
def _units_are_divided_twice(rank: int) -> Patch:
    reduce_unit = fsdp1.reduce_unit

    def twice(state: Any, gradient: Any, *shard: Any) -> None:
        reduce_unit(state, gradient.div_(state[0].world_size), *shard)

    return fsdp1, "reduce_unit", twice


@_bug
def _a_bad_shard_is_stepped(rank: int) -> Patch:
    return commhooks.zero._shards, "_on_all_ranks", lambda means, group: True


@_bug
def _a_bad_distance_is_taken(rank: int) -> Patch:
    return diloco, "_is_finite", lambda mean: True


@_bug
def _a_tcp_store_is_not_known(rank: int) -> Patch:
    call = _state.HookState.agree

    def only_files(self: Any, *rest: Any) -> None:
        store = dist.distributed_c10d._get_default_store()
        if "TCP" in type(store.underlying_store).__name__:
            raise OSError("no such file")
        call(self, *rest)

    return _state.HookState, "agree", only_files


@_bug
def _process_dies(rank: int) -> Patch:
    def dying(self: Any) -> Any:
        os._exit(7)

    return _state.HookState, "state_dict", dying
