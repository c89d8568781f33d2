"""Defines the hook of a ``ZeroOptimizer``, which reduces each bucket to one shard per rank."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from commhooks.core.scheme import Scheme
from commhooks.errors import RegistrationError
from commhooks.hook.sharded_bucket import ShardedBucket, need_shards
from commhooks.hook.state import HookState
from commhooks.kernels import all_finite
from commhooks.wrappers.make import make
from commhooks.zero.shard import BucketShard
from ddp_core import Exchange

__all__ = ["InShards", "ZeroHook"]

Future = torch.futures.Future
GoOn = Callable[[BucketShard, Tensor], Exchange]


class ZeroHook(HookState):
    """Reduces buckets to shards, and tells an optimizer of the means."""

    takes_gradients = True  # ``ddp_core`` leaves ``.grad`` as it is
    _shards: Sequence[BucketShard] = ()
    _landed: Callable[[], Callable[[bool], None] | None] | None = None
    _go_on: Callable[[], GoOn | None] | None = None

    def serve(
        self, shards: Sequence[BucketShard], landed: Callable[[bool], None], go_on: GoOn | None
    ) -> None:
        """Reduces to these shards from now on.

        Args:
            landed: is called after each step, with whether the means of all ranks are finite.
            go_on: ends the exchange of a bucket whose mean has arrived; None: nothing follows.
        """
        self._shards, self._means = shards, dict[int, Tensor]()
        # Weak: the model holds its hook, and no cycle should keep a model alive.
        self._landed = weakref.WeakMethod(landed)
        self._go_on = None if go_on is None else weakref.WeakMethod(go_on)

    @property
    def bucket_cap_mb(self) -> float | None:
        # Not that of the scheme: ``switch`` would lay out other buckets.
        return None

    def switch(self, scheme: str | Scheme, **options: Any) -> None:
        built = make(scheme, **options)
        need_shards(built, "ZeroOptimizer")
        super().switch(built)

    def start(self, bucket: Any) -> Future[Tensor]:
        """Starts the reduction of one bucket and returns the future of this rank's shard."""
        number = bucket.index()
        shard = self._shards[number] if number < len(self._shards) else None
        if shard is None or [*map(id, shard.parameters)] != [*map(id, bucket.parameters())]:
            raise RegistrationError(
                "ZeroOptimizer: the model has other buckets than before (request_layout, another "
                "process group, or an unpickled model), and the optimizer's state is kept by "
                "bucket; make another ZeroOptimizer and load the state of this one, saved by "
                "state_dict(gather=True)"
            )
        mean = torch.empty_like(shard.exact)
        self._means[number] = mean
        then = None
        if self._go_on is not None:
            if shard.arrived:
                raise RegistrationError(
                    "ZeroOptimizer(in_backward=True): a bucket comes that was stepped already: "
                    "call step() and zero_grad() after each synchronised backward pass, and "
                    "accumulate within no_sync()"
                )
            then = partial(_alive(self._go_on), shard)
        whole = bucket.buffer()
        return super().start(ShardedBucket(number, whole, shard.layout, shard.spans, mean, then))

    def step_landed(self, left_alone: Iterable[Tensor] = ()) -> None:
        left_alone = list(left_alone)
        super().step_landed(left_alone)
        means, self._means = self._means, {}
        alone = set(map(id, left_alone))
        finite = _on_all_ranks(means, self._binding.group())
        for number, mean in means.items():
            # Gradient scalers look at gradients rank by rank: all of them see the same verdict.
            if self._go_on is None:
                self._shards[number].land(mean if finite else mean.fill_(torch.nan), alone)
            self._shards[number].arrived = True
            for parameter in self._shards[number].parameters:
                if id(parameter) not in alone:
                    parameter.grad = InShards(parameter)
        _alive(self._landed)(finite)

    def step_abandoned(self) -> None:
        super().step_abandoned()
        self._means = {}


def _alive(method: Callable[[], Any] | None) -> Any:
    """Returns the method of an optimizer that is still there."""
    found = None if method is None else method()
    if found is None:
        raise RegistrationError(
            "ZeroOptimizer: it was deleted, and the model still averages for it; keep it, or wrap "
            "the module again"
        )
    return found


def _on_all_ranks(means: Mapping[int, Tensor], group: dist.ProcessGroup) -> bool:
    """Whether all shards of all ranks are finite."""
    if not means:
        return True
    flags = torch.stack([all_finite(mean) for mean in means.values()])
    wrong = (~flags.all()).to(torch.float32)
    dist.all_reduce(wrong, dist.ReduceOp.MAX, group=group)
    return not wrong.item()


class InShards(Tensor):
    """Stands in ``.grad`` of a parameter, the mean of whose gradient lies in shards.

    Whoever reads it, such as ``torch.nn.utils.clip_grad_norm_``, gets an error instead of the
    gradient of this rank alone.
    """

    def __new__(cls, parameter: Tensor) -> InShards:
        # One entry of memory for all.
        nothing = torch.full((), torch.nan, dtype=parameter.dtype, device=parameter.device)
        made: InShards = Tensor._make_subclass(cls, nothing.expand(parameter.shape))
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RegistrationError(
            "the mean of this gradient lies in shards on the ranks (ZeroOptimizer), and .grad has "
            "none: use ZeroOptimizer.clip_grad_norm_, or the gradients in its param_groups"
        )
