"""Defines ``StepInfo``, the facts of a step that do not depend on gradients or buckets."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from commhooks.core.memory import Memory
from ddp_core import stream_of

__all__ = ["Counters", "StepInfo", "number_of"]


Counters = dict[tuple[int, torch.device, object], Tensor]


class StepInfo:
    """Holds the facts of one step on one rank that initial values of slots may depend on.

    A :class:`commhooks.Bucket` has them, too, and adds gradient, residual and layout.

    Attributes:
        memory: tensors that survive the step, see :class:`commhooks.core.Memory`.
        step: number of the synchronised backward pass, from 0.
        rank, world_size: within the process group.
        seed: keys all random bits, together with names, step and rank; the same on every rank.
        counters: the tensors of :meth:`step_on`, which the buckets of a step share.
    """

    def __init__(
        self,
        *,
        memory: Memory | None = None,
        step: int = 0,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.memory = Memory() if memory is None else memory
        self.step, self.rank, self.world_size, self.seed = step, rank, world_size, seed
        self._dtype = dtype
        self.counters: Counters = {}

    @property
    def wide_dtype(self) -> torch.dtype:
        """Returns the dtype of sums of gradients: float32, or float64 if the gradient is."""
        return torch.promote_types(self._dtype, torch.float32)

    def step_on(self, device: torch.device) -> Tensor:
        """Returns the step's number as an int64 tensor on a device, for kernels.

        One tensor serves all buckets of a step, so that it is filled once and not for every draw.
        """
        # Per stream as well: an exchange on another stream would not wait for the fill.
        key = (self.step, device, stream_of(device))
        counter = self.counters.get(key)
        if counter is None:
            counter = torch.full((), self.step, dtype=torch.int64, device=device)
            self.counters[key] = counter
        return counter

    def generator(
        self, name: str, *, shared: bool = True, step: int | None = None
    ) -> torch.Generator:
        """Returns a random generator on the CPU, keyed by ``name`` and step.

        Keyed draws need no state in a checkpoint, and do not depend on the bucket layout.

        Args:
            name: of the parameter, or anything else that tells draws apart.
            shared: the same bits on every rank; False: keyed by the rank, too.
            step: this step by default.
        """
        # On the CPU: a generator on a GPU draws other bits, and ranks may have different devices.
        step = self.step if step is None else step
        text = f"{self.seed}/{name}/{step}/{'shared' if shared else self.rank}"
        return torch.Generator().manual_seed(number_of(text) >> 1)


def number_of(text: str) -> int:
    """Hashes a text to 64 bits."""
    # Not hash(): Python salts it per process, and ranks have to agree.
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
