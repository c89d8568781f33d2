"""Defines ``Slot``, a tensor that a scheme keeps per parameter, and the facts of a step."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from commhooks.core._layout import Layout
from commhooks.core._memory import Memory
from ddp_core import stream_of

__all__ = ["Counters", "Number", "Slot", "StepInfo", "number_of"]


Counters = dict[tuple[int, torch.device, object], Tensor]


class StepInfo:
    """Holds the facts of one step on one rank that initial values of slots may depend on.

    A :class:`commhooks.core.Bucket` has them, too, and adds gradient, residual and layout.

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
            name: name of the parameter, or any other key of the draw.
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


# ---- slots


@dataclass(frozen=True)
class Slot:
    """Declares one tensor per parameter that survives the step and is part of a checkpoint.

    A scheme lists its slots in ``keeps``, and reads and writes them with ``bucket.read(slot)`` and
    ``bucket.write(slot, values)``. Subclasses override ``shape``, ``initial`` or ``check`` where a
    tensor is not like its parameter, does not begin with zeros, or obeys further rules.

    Args:
        key: name of the tensors in a checkpoint; unique among all schemes.
        resize: how a checkpoint is carried over to another number of ranks. "same": the value has
            the same bits on all ranks. "sum": the value of each old rank is added to that of one
            new rank, scaled so that the mean over ranks is preserved. "mean": every rank gets the
            mean over the old ranks. "drop": the value is forgotten.
        dtype: dtype of the tensor. None: float32, or float64 if the gradient is.
        mean_key: key of a slot that holds the mean of this slot over ranks, the same on all ranks;
            this slot takes that mean where a rank is lost with its value. None: no such slot.

    Example:
        >>> momentum = Slot("my_scheme.momentum", resize="mean")
    """

    key: str
    resize: Literal["same", "sum", "mean", "drop"] = "same"
    dtype: torch.dtype | None = None
    mean_key: str | None = None

    def shape(self, parameter: torch.Size) -> Sequence[int] | None:
        """Returns the shape of the tensor kept for a parameter; None if none is kept."""
        return parameter

    def initial(self, name: str, shape: torch.Size, now: StepInfo) -> Tensor | None:
        """Returns the value before the first step; None if a step has to write one first.

        Args:
            name: of the parameter.
            shape: of the kept tensor, not of the parameter.
            now: rank, step, random bits and dtype. No bucket: a value may not depend on how
                parameters are laid out in buckets.
        """
        return torch.zeros(shape, dtype=self.dtype or now.wide_dtype, device="cpu")

    def check(self, value: Tensor, parameter: torch.Size) -> str | None:
        """Returns why a loaded value cannot belong to this slot; None if it can.

        Values of other settings (PowerSGD of another rank) are accepted.

        Args:
            value: the loaded tensor of one parameter.
            parameter: shape of that parameter.
        """
        if not value.is_floating_point():
            return f"is of {value.dtype}, not floating point"
        if value.shape != parameter:
            return f"has shape {tuple(value.shape)}, the parameter has {tuple(parameter)}"
        return None

    def layout(self, layout: Layout) -> Layout:
        """Returns the layout of the kept tensors of all parameters of a bucket."""
        # Tensors shaped as their parameters need no layout of their own: memory finds the bucket's.
        return layout if type(self).shape is Slot.shape else _layout_of(self, layout)


@lru_cache(maxsize=1024)  # several times per bucket and step
def _layout_of(slot: Slot, layout: Layout) -> Layout:
    shapes = zip(layout.names, map(slot.shape, layout.shapes), strict=True)
    tensors = [(name, shape) for name, shape in shapes if shape is not None]
    return Layout([name for name, _ in tensors], [shape for _, shape in tensors])


@dataclass(frozen=True)
class Number(Slot):
    """Declares one number per parameter, 0 or more, in float64."""

    # float64: a squared norm of float32 entries can leave the range of float32.

    dtype: torch.dtype | None = torch.float64

    def shape(self, parameter: torch.Size) -> Sequence[int] | None:
        return ()

    def check(self, value: Tensor, parameter: torch.Size) -> str | None:
        if not value.is_floating_point() or value.shape:
            return f"is {value.dtype} of shape {tuple(value.shape)}, not one number"
        return None if value.item() >= 0 else f"is {value.item()}, not 0 or more"
