"""``StepInfo``: what a rank knows in a step before it has looked at any gradient."""

from __future__ import annotations

import hashlib

import torch

from commhooks.core.memory import Memory

__all__ = ["StepInfo", "number_of"]


class StepInfo:
    """One rank in one step: what the initial value of a :class:`commhooks.Slot` may depend on.

    Attributes:
        memory: tensors that survive the step, see :class:`commhooks.core.Memory`.
        step: counts synchronised backward passes from 0.
        rank, world_size: within the process group.
        seed: base of all random bits; the same on every rank.
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

    @property
    def wide_dtype(self) -> torch.dtype:
        """The dtype of sums of gradients: float32, or float64 if the gradient is."""
        return torch.promote_types(self._dtype, torch.float32)

    def generator(
        self, name: str, *, shared: bool = True, step: int | None = None
    ) -> torch.Generator:
        """A CPU random generator keyed by parameter name and step, and by rank unless ``shared``.

        Keyed draws need no state in a checkpoint, and do not depend on the bucket layout.
        """
        step = self.step if step is None else step
        text = f"{self.seed}/{name}/{step}/{'shared' if shared else self.rank}"
        return torch.Generator().manual_seed(number_of(text) >> 1)


def number_of(text: str) -> int:
    """64 bits that stand for a text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
