"""Sends what has changed in the parameters that FSDP2 gathers, packed by a codec.

All ranks keep the parameters as they were gathered last, in the dtype of the gather. An owner sends
its shard minus its part of these; what rounding leaves is a part of the next difference, so that
errors do not add up (Jia et al., SDP4Bit, 2024: quantised weight differences).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from commhooks._torch import (
    AllGather,
    DefaultAllGather,
    DefaultAllocMixin,
    TrainingState,
    fsdp2_training_state,
)
from commhooks.core.layout import Layout
from commhooks.core.scheme import Scheme
from commhooks.hook.call import write_into
from commhooks.hook.engine import Engine
from commhooks.hosts.collectives import Collectives
from commhooks.hosts.fsdp2_packing import GatherPacked, Packing
from ddp_core import Exchange, borrow_memory
from ddp_core.reducer.accumulators import NO_BACKWARD, backward_number

__all__ = ["DifferencesAllGather"]


class DifferencesAllGather(DefaultAllocMixin, AllGather):
    """Gathers the parameters of one FSDP2 module as differences.

    Attributes:
        held: what all ranks have gathered, one shard after the other. None: the next gather is
            exact.
        sent: this rank's shard as it was when the difference to it was sent.

    Args:
        collectives: run the gathers.
        group: FSDP2's group of the module's parameters.
    """

    def __init__(self, collectives: Collectives, group: Any) -> None:
        self._collectives, self._group, self._packing = collectives, group, Packing.of(group)
        self.held: Tensor | None = None
        self.sent: Tensor | None = None
        self._anew = False

    def begin_anew(self, *_: Any) -> None:
        """Makes the next gather outside of backward exact."""
        self._anew = True

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Any:
        if group.size() != self._collectives.world_size:  # see ``SchemeAllGather``
            return DefaultAllGather()(output_tensor, input_tensor, group, async_op)
        in_backward = backward_number() != NO_BACKWARD
        if self._anew and not in_backward:  # backward has the weights of forward
            self.held, self._anew = None, False
        if self.held is not None and _kind(self.held) != _kind(output_tensor):
            self.held = None  # of another mixed precision
        # For the gradients of a module FSDP2 asks for the weights that it has run with: those held,
        # without a message. All ranks are at the same place, so that they decide alike. A module
        # that runs within backward gathers: its parameters may be new, and a rank knows of its own
        # shard only.
        for_gradients = fsdp2_training_state(self._group) == TrainingState.PRE_BACKWARD
        if in_backward and for_gradients and self.held is not None:
            borrow_memory(self.held)
            write_into(output_tensor, self.held)
            return None
        packing = self._packing
        call = _Differences("all_gather", input_tensor, output_tensor, packing=packing, holder=self)
        return self._collectives.run(call, None, async_op)


@dataclass(frozen=True)
class _Differences(GatherPacked):
    """Gathers what has changed since a module's parameters were gathered last.

    Attributes:
        holder: the module's ``DifferencesAllGather``, which holds what was gathered last.
    """

    holder: Any = None

    def is_plain(self, scheme: Scheme) -> bool:
        return self.holder.held is None or super().is_plain(scheme)

    def exchange(self, engine: Engine, layout: Layout, number: int, *, agree: bool) -> Exchange:
        holder, packing, now = self.holder, self.packing, self.given.clone()
        held, plain = holder.held, self.is_plain(engine.scheme)
        # Nothing, until the exchange has ended: after a failure ranks may hold different values.
        holder.held = None
        if plain:
            yield from super().exchange(engine, layout, number, agree=agree)
            holder.held, holder.sent = self.into.clone(), now
            return self.into
        borrow_memory(held)
        rows = held.view(engine.world_size, -1)
        before = rows[engine.rank]
        # Zeros change nothing: forward passes between two steps have the same weights, and so have
        # modules that run again within backward. Each rank decides for its own shard. It sends if
        # what was sent has overflowed, too.
        sends = (now != holder.sent).any() | ~before.isfinite().all()
        # NaN and infinity would stay in all differences. Every rank holds the same bits.
        held.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        own = now - before.to(torch.promote_types(held.dtype, torch.float32))
        change = packing.take(torch.where(sends, own, 0.0), packed=True)
        exact = packing.take(now, packed=False)
        changed, others = yield from self.gather(engine, layout, number, change, exact, agree=agree)
        # Where all entries are packed, ``packed`` is ``rows`` itself, and this adds in place.
        packed = packing.take(rows, packed=True).add_(changed)
        if packing.mixed:
            rows.copy_(packing.joined(packed, others))
        write_into(self.into, held)
        holder.held, holder.sent = held, now
        return self.into


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device
