"""Defines the hook of a ``ZeroOptimizer``, which reduces each bucket to one shard per rank."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from commhooks.errors import RegistrationError
from commhooks.hook._exchanges import HookBucket
from commhooks.hook._state import HookState
from commhooks.zero._shard import BucketShard

__all__ = ["ZeroHook"]

Future = torch.futures.Future


class ZeroHook(HookState):
    """Reduces buckets to shards, and passes the means to the optimizer."""

    owns_gradients = True  # ``ddp_core`` leaves ``.grad`` as it is
    _shards: Sequence[BucketShard] = ()
    _optimizer_ref: weakref.ref[Any] | None = None

    def attach_shards(self, owner: Any, shards: Sequence[BucketShard]) -> None:
        """Reduces to these shards from now on, and passes means to ``owner``, a :class:`Shards`."""
        self._shards, self._means = shards, dict[int, Tensor]()
        self.engine.counts = False  # the owner's ranks agree on the means in any case
        self.shards_for = "ZeroOptimizer"
        self.fixed_group_reason = (
            "a ZeroOptimizer keeps its shards on these ranks: save state_dict(gather=True), and "
            "make another one, which loads it, on a model over the other ranks"
        )
        # Weak: the model holds its hook, and no cycle should keep a model alive.
        self._optimizer_ref = weakref.ref(owner)

    @property
    def bucket_cap_mb(self) -> float | None:
        # Not that of the scheme: ``switch`` would lay out other buckets.
        return None

    @property
    def _owner(self) -> Any:
        owner = None if self._optimizer_ref is None else self._optimizer_ref()
        if owner is None:
            raise RegistrationError(
                "ZeroOptimizer: it was deleted, and the model still averages for it; keep it, or "
                "wrap the module again"
            )
        return owner

    def forward_begins(self) -> None:
        super().forward_begins()
        self._owner.forward_begins()

    def start(self, bucket: Any) -> Future[Tensor]:
        """Starts the reduction of one bucket and returns the future of this rank's shard."""
        number, owner = bucket.index(), self._owner
        shard = self._shards[number] if number < len(self._shards) else None
        if shard is None or [*map(id, shard.parameters)] != [*map(id, bucket.parameters())]:
            raise RegistrationError(
                "ZeroOptimizer: the model has other buckets than before (request_layout, another "
                "process group, or an unpickled model), and the optimizer's state is kept by "
                "bucket; make another ZeroOptimizer and load the state of this one, saved by "
                "state_dict(gather=True)"
            )
        if owner.in_backward and shard.arrived:
            raise RegistrationError(
                "ZeroOptimizer(in_backward=True): a bucket comes that was stepped already: call "
                "step() and zero_grad() after each synchronised backward pass, and accumulate "
                "within no_sync()"
            )
        then = partial(owner.step_and_gather, shard) if owner.in_backward else None
        mean = self._means[number] = torch.empty_like(shard.exact)
        whole = bucket.buffer()
        return super().start(HookBucket(number, whole, shard.layout, shard.spans, mean, then))

    def gradients_written(self, unused: Iterable[Tensor] = ()) -> None:
        alone: Any = set(unused)
        super().gradients_written(alone)
        means, self._means = self._means, {}
        finite = self._owner.receive_means(means, alone)
        if not self.engine.keeps_memory:
            self.engine.skipped += not finite

    def step_aborted(self) -> None:
        super().step_aborted()
        self._means = {}
