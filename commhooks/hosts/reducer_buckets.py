"""Finds the buckets of torch's reducer in the tensors that it all-reduces."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from commhooks._torch import reducer_buckets
from commhooks.errors import RegistrationError
from commhooks.hook.parameters import memory_order
from commhooks.hook.reducer_bucket import ReducerBucket

__all__ = ["ReducerBuckets"]

# torch lays out its buckets anew after the first step, with a static graph after the second.
_LOOKS = 3


class ReducerBuckets:
    """Knows the buckets of a model's reducer, and which of them a backward pass has computed.

    The reducer tells nobody which parameters it reduces. It is asked for its buckets in the forward
    passes after which it may have others, and launches them in their order. A tensor is taken for a
    bucket if it has the bucket's size and the gradients of the bucket have been computed since.

    Args:
        model: torch's DistributedDataParallel, before its first step.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        self._known: list[tuple[tuple[int, torch.dtype], ReducerBucket]] = []
        self._next = self._looks = 0
        self._ranks = model.process_group.size()
        self._reduces = False  # this pass, whose gradients are not accumulated (no_sync)
        self._computed: set[Tensor] = set()  # gradients of this pass
        self._told: list[Any] = []  # handles of what tells it
        self._look(model, 0)

    @property
    def missing(self) -> bool:
        """Whether gradients that are to be reduced were computed, and came in no bucket."""
        return self._reduces and bool(self._computed)

    def forward_begins(self, model: DistributedDataParallel, step: int) -> None:
        """Takes note that another pass begins, in which the reducer may have other buckets."""
        self._next, self._reduces = 0, model.require_backward_grad_sync
        self._computed.clear()
        if self._looks < _LOOKS and self._looked_at != step:
            self._look(model, step)

    def take(self, tensor: Tensor, *, unused: bool) -> ReducerBucket | None:
        """Returns the bucket that a tensor is, whose gradients then count as reduced.

        Args:
            unused: a pass may leave out all parameters of a bucket (``find_unused_parameters``).
        """
        key = (tensor.numel(), tensor.dtype)
        for at in chain(range(self._next, len(self._known)), range(self._next)):
            known, bucket = self._known[at]
            if known == key and self._is_computed(bucket, tensor, unused):
                self._next = at + 1
                self._computed.difference_update(bucket.members)
                return bucket
        return None

    def _is_computed(self, bucket: ReducerBucket, tensor: Tensor, unused: bool) -> bool:
        """Whether backward has computed the gradients of a bucket, and nobody has reduced them."""
        if not self._reduces:
            return False
        if not self._computed.isdisjoint(bucket.members):
            return True
        return unused and self._is_left_out(bucket, tensor)

    def _is_left_out(self, bucket: ReducerBucket, tensor: Tensor) -> bool:
        """Whether a tensor has this rank's part of a bucket of which it has used nothing.

        That is what the gradients were before the pass: zeros, unless steps add up.
        """
        before = [one.grad for one in bucket.members]
        memory = tensor.untyped_storage().data_ptr()
        if any(one is not None and one.untyped_storage().data_ptr() == memory for one in before):
            return True  # gradient_as_bucket_view
        shares = [
            tensor.new_zeros(member.numel())
            if gradient is None
            else gradient.permute(memory_order(member)).reshape(-1)
            for member, gradient in zip(bucket.members, before, strict=True)
        ]
        return torch.equal(tensor, torch.cat(shares).mul_(1.0 / self._ranks))

    def _look(self, model: DistributedDataParallel, step: int) -> None:
        self._looked_at, self._looks = step, self._looks + 1
        # It allocates the memory of all gradients, which is why it is not done in every step, and
        # why no view of it is kept.
        try:
            buckets = reducer_buckets(model.reducer)
        except RuntimeError as error:
            raise RegistrationError(
                "process_group(...).attach(model): torch does not tell the buckets of a model with "
                "sparse gradients; commhooks.register(model, scheme) runs with them"
            ) from error
        self._known = [
            (
                (one.buffer().numel(), one.buffer().dtype),
                ReducerBucket(
                    *(one.index(), one.parameters(), one.is_last()), one.buffer().new_empty(0)
                ),
            )
            for one in buckets
        ]
        while self._told:
            self._told.pop().remove()
        # One parameter of each bucket will do, unless a pass may leave that one out.
        most = None if model.find_unused_parameters else 1
        for _, bucket in self._known:
            for parameter in bucket.members[:most]:
                told = parameter.register_post_accumulate_grad_hook(self._computed.add)
                self._told.append(told)
