"""Bugs that can be planted in the ranks, each with a case that shows it to the fuzzer."""

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
from commhooks.hook._engine import Engine
from commhooks.hook._state import HookState
from commhooks.hosts._process_group import SchemeGroup
from commhooks.local import _diloco as diloco
from commhooks.zero import _shards as zero_shards
from ddp_core.ddp._forward import ShadowHook
from ddp_core.reducer._buckets import FlatBucket
from ddp_core.reducer._unused import UsedMap
from tests.fuzz.case import Case

__all__ = ["BUGS", "CASES", "planted"]

Fault = Callable[..., Any]
BUGS: dict[str, tuple[Any, str, Fault]] = {}
CASES: dict[str, Case] = {}


def _bug(owner: Any, attribute: str, **case: Any) -> Callable[[Fault], Fault]:
    """Registers what runs in place of a function: it gets that one and the rank first."""

    def register(fault: Fault) -> Fault:
        name = fault.__name__.lstrip("_")
        BUGS[name], CASES[name] = (owner, attribute, fault), Case(**case)
        return fault

    return register


@contextmanager
def planted(name: str, rank: int) -> Iterator[None]:
    """The bug is there inside; no name, no bug."""
    if not name:
        yield
        return
    owner, attribute, fault = BUGS[name]
    right = getattr(owner, attribute)

    def wrong(*arguments: Any, **options: Any) -> Any:
        return fault(right, rank, *arguments, **options)

    with mock.patch.object(owner, attribute, wrong):
        yield


POISON = ((1, "poison", "middle", "nan"),)


@_bug(Memory, "write", scheme="topk")
def _residual_dropped(right: Fault, rank: int, self: Any, key: str, *rest: Any) -> None:
    if key == "residual" and rest[-1] is not None:
        rest[-1].zero_()
    right(self, key, *rest)


@_bug(Memory, "write", host="core", scheme="onebit")
def _residual_two_percent_off(right: Fault, rank: int, self: Any, key: str, *rest: Any) -> None:
    if key == "residual" and rest[-1] is not None:
        rest[-1].mul_(0.98)
    right(self, key, *rest)


@_bug(Engine, "_settle", scheme="int4")
def _step_never_ends(right: Fault, rank: int, *_: Any) -> None:
    pass


@_bug(Bucket, "random", scheme="random_k")
def _draw_differs_by_rank(right: Fault, rank: int, self: Any, purpose: str, **how: Any) -> Any:
    return right(self, f"{purpose}{self.rank}", **how)


@_bug(ddp_core.AllReduce, "issue", host="core", world=3)
def _mean_over_one_rank_less(right: Fault, rank: int, self: Any, group: Any) -> Any:
    if self.op == "mean" and group.size() > 2:
        self.tensor.mul_(group.size() / (group.size() - 1))
    return right(self, group)


@_bug(Memory, "commit", scheme="topk", events=((2, "poison", "middle", "nan"),))
def _bad_step_is_kept(right: Fault, rank: int, self: Any, good: torch.Tensor, *rest: Any) -> None:
    right(self, torch.ones_like(good), *rest)


@_bug(
    Engine,
    "abandon",
    host="core",
    scheme="topk",
    ddp={"bucket_cap_mb": 0.0005},
    events=((1, "raise", "last"),),
)
def _raised_step_is_kept(right: Fault, rank: int, self: Any, *rest: Any) -> None:
    self.end(*rest)


@_bug(HookState, "switch", scheme="topk", events=((2, "switch", "none", {}),))
def _switch_forgets_residual(right: Fault, rank: int, self: Any, *scheme: Any, **how: Any) -> None:
    right(self, *scheme, **how)
    self.engine.memory.drop("residual")


@_bug(HookState, "load_state_dict", scheme="onebit", events=((2, "resume", "torch"),))
def _load_takes_rank_zeros(right: Fault, rank: int, self: Any, state: Any, **how: Any) -> None:
    if isinstance(state, dict):
        local = f"rank{self.rank}"
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, state[local]["memory"], group=self._group())
        state = {**state, local: {"rank": self.rank, "memory": values[0]}}
    right(self, state, **how)


@_bug(
    UsedMap,
    "globally_unused",
    host="core",
    model=("branches",),
    use="once",
    ddp={"find_unused_parameters": True},
)
def _unused_are_overwritten(right: Fault, rank: int, *_: Any) -> None:
    pass


@_bug(FlatBucket, "fill", host="core", micro=2)
def _small_gradients_of_rank_one_count_half(
    right: Fault, rank: int, self: Any, gradients: Any, divisor: Any
) -> None:
    factor = 0.5 if rank == 1 else 1.0
    right(self, [None if g is None else g * factor for g in gradients], divisor)


@_bug(HookState, "start", scheme="bf16")
def _one_rank_waits(right: Fault, rank: int, self: Any, bucket: Any) -> Any:
    if rank == 1 and self.step == 1:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        return future  # nobody completes it
    return right(self, bucket)


@_bug(ShadowHook, "post_hook", host="core", join=1)
def _joined_rank_keeps_its_model(right: Fault, rank: int, *_: Any) -> None:
    pass


@_bug(commhooks.ErrorFeedback, "exchange", host="core", scheme="random_k")
def _feedback_is_off(right: Fault, rank: int, self: Any, bucket: Any) -> Any:
    return self.scheme.exchange(bucket) if bucket.step % 2 else right(self, bucket)


# ---- on other hosts, and in what goes between ranks


@_bug(Dense, "exchange", scaled=True)
def _small_gradients_are_lost(right: Fault, rank: int, self: Any, bucket: Any) -> Any:
    bucket.raw[bucket.raw.abs() < 1e-4 * bucket.raw.abs().max()] = 0
    return right(self, bucket)


@_bug(SchemeReduceScatter, "__call__", host="fsdp2")
def _host_forgets_to_divide(
    right: Fault, rank: int, self: Any, output_tensor: Any, **how: Any
) -> None:
    right(self, output_tensor, **how)
    output_tensor.mul_(how["group"].size())


@_bug(SchemeReduceScatter, "__call__", host="fsdp2", scheme="int8")
def _shard_of_another_rank(
    right: Fault, rank: int, self: Any, output_tensor: Any, input_tensor: Any, **how: Any
) -> None:
    parts = input_tensor.view(how["group"].size(), -1).roll(1, 0)
    right(self, output_tensor, parts.view(-1), **how)


@_bug(ReplicaAllReduce, "__call__", host="hsdp", world=4, setting=("between",))
def _what_comes_from_other_nodes_is_lost(right: Fault, rank: int, self: Any, reduced: Any) -> Any:
    return right(self, reduced.clone())


@_bug(ddp_core.AllReduce, "issue", host="tensor_parallel", world=4)
def _all_ranks_are_replicas(right: Fault, rank: int, self: Any, group: Any) -> Any:
    return right(self, dist.group.WORLD)


@_bug(SchemeGroup, "_run", host="group")
def _a_group_gives_the_mean_for_a_sum(right: Fault, rank: int, self: Any, *call: Any) -> Any:
    return right(self, call[0], dist.ReduceOp.AVG)


@_bug(functions, "sums", host="collectives", setting=("all_reduce",))
def _collectives_sum_for_a_mean(right: Fault, rank: int, *_: Any) -> bool:
    return True


@_bug(
    CollectiveState,
    "_named",
    host="collectives",
    scheme="topk",
    setting=("all_reduce",),
    model=("large",),
)
def _names_share_what_they_keep(right: Fault, rank: int, self: Any, call: Any, name: Any) -> str:
    return str(tuple(call.input.shape))


@_bug(fsdp1, "reduce_unit", host="fsdp1", setting=("FULL_SHARD",))
def _units_are_divided_twice(
    right: Fault, rank: int, state: Any, gradient: Any, *shard: Any
) -> None:
    right(state, gradient.div_(state[0].world_size), *shard)


@_bug(zero_shards, "_on_all_ranks", host="zero", events=POISON)
def _a_bad_shard_is_stepped(right: Fault, rank: int, *_: Any) -> bool:
    return True


@_bug(diloco, "_is_finite", host="diloco", events=POISON)
def _a_bad_distance_is_taken(right: Fault, rank: int, *_: Any) -> bool:
    return True


@_bug(HookState, "agree", host="core", store="tcp")
def _a_tcp_store_is_not_known(right: Fault, rank: int, self: Any, *rest: Any) -> None:
    store = dist.distributed_c10d._get_default_store()
    if "TCP" in type(store.underlying_store).__name__:
        raise OSError("no such file")
    right(self, *rest)


@_bug(HookState, "state_dict")
def _process_dies(right: Fault, rank: int, *_: Any) -> None:
    os._exit(7)
