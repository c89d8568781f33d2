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
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultAllocMixin,
)

from commhooks.core.layout import Layout
from commhooks.core.scheme import Scheme
from commhooks.hook.call import Call, write_into
from commhooks.hook.engine import Engine
from commhooks.hosts.collectives import Collectives
from ddp_core import Exchange, borrow_memory
from ddp_core.reducer.accumulators import NO_BACKWARD, backward_number

__all__ = ["DifferencesAllGather"]


class DifferencesAllGather(DefaultAllocMixin, AllGather):
    """Gathers the parameters of one FSDP2 module as differences.

    Attributes:
        held: what all ranks have, one rank's after the other's. None: the next gather is exact.
        sent: this rank's shard as it was when the difference to it was sent.
    """

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self.held: Tensor | None = None
        self.sent: Tensor | None = None
        self._used_in = NO_BACKWARD  # the backward pass, since the last gather outside of one

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Any:
        if group.size() != self._collectives.world_size:  # see ``SchemeAllGather``
            return DefaultAllGather()(output_tensor, input_tensor, group, async_op)
        if self.held is not None and _kind(self.held) != _kind(output_tensor):
            self.held = None  # of another mixed precision
        if self._has_gathered_for(backward_number()) and self.held is not None:
            # The weights of forward, also where a checkpoint runs it again: no message.
            borrow_memory(self.held)
            write_into(output_tensor, self.held)
            return None
        call = _Differences("all_gather", input_tensor, output_tensor, gather=self)
        return self._collectives.run(call, None, async_op)

    def _has_gathered_for(self, backward: int) -> bool:
        """Whether a backward pass is under way, and the first since the last gather outside."""
        first = self._used_in in (NO_BACKWARD, backward)
        self._used_in = backward
        return backward != NO_BACKWARD and first


@dataclass(frozen=True)
class _Differences(Call):
    """Gathers what has changed since a module's parameters were gathered last.

    Attributes:
        gather: of the module.
    """

    gather: Any = None

    def is_plain(self, scheme: Scheme) -> bool:
        return self.gather.held is None or super().is_plain(scheme)

    def exchange(self, engine: Engine, layout: Layout, number: int, *, agree: bool) -> Exchange:
        held, gather, now = self.gather.held, self.gather, self.given.clone()
        # Until the exchange has ended: after one that failed, ranks may hold different values.
        plain, gather.held = self.is_plain(engine.scheme), None
        if plain:
            yield from super().exchange(engine, layout, number, agree=agree)
            gather.held, gather.sent = self.into.clone(), now
            return self.into
        borrow_memory(held)
        # NaN and infinity would stay in all differences. Every rank holds the same bits.
        held.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        wide = torch.promote_types(held.dtype, torch.float32)
        own = now - held.view(engine.world_size, -1)[engine.rank].to(wide)
        # Zeros change nothing: forward passes between two steps have the same weights, and so has
        # the backward pass through all of them. Each rank decides for its own shard.
        own = torch.where((now != gather.sent).any(), own, 0.0)
        changed = Call("all_gather", own, torch.empty_like(held, dtype=wide))
        yield from changed.exchange(engine, layout, number, agree=agree)
        write_into(self.into, held.add_(changed.into))
        gather.held, gather.sent = held, now
        return self.into


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device
