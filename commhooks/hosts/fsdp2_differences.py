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
from commhooks.hook.call import Call
from commhooks.hook.engine import Engine
from commhooks.hosts.collectives import Collectives
from ddp_core import Exchange
from ddp_core.reducer.accumulators import NO_BACKWARD, backward_number

__all__ = ["DifferencesAllGather", "GatheredDifferences"]


class GatheredDifferences(Collectives):
    """Gathers parameters as differences; see :func:`commhooks.hosts.gather_parameters`."""

    def __init__(self, scheme: Scheme, group: dist.ProcessGroup, *, seed: int) -> None:
        super().__init__(scheme, group, seed=seed)
        self.modules: list[DifferencesAllGather] = []

    def begin_anew(self) -> None:
        """Makes the next forward pass send the parameters themselves; all ranks call it.

        For after loading other parameters into the model: their differences would be as large as
        they are, and rounded as coarsely.
        """
        for module in self.modules:
            module.held = None


class DifferencesAllGather(DefaultAllocMixin, AllGather):
    """Gathers the parameters of one FSDP2 module as differences.

    Attributes:
        held: what all ranks have, of one rank after the other. None: the next gather is exact.
    """

    def __init__(self, collectives: GatheredDifferences) -> None:
        self._collectives = collectives
        self.held: Tensor | None = None
        collectives.modules.append(self)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Any:
        if group.size() != self._collectives.world_size:  # see ``SchemeAllGather``
            return DefaultAllGather()(output_tensor, input_tensor, group, async_op)
        held = self.held
        if held is not None and _kind(held) != _kind(output_tensor):
            held = self.held = None  # another mixed precision
        if held is not None and backward_number() != NO_BACKWARD:
            # The weights of the forward pass, also where checkpoints run it again: no message.
            output_tensor.copy_(held)
            return None
        call = _Differences("all_gather", input_tensor, output_tensor, module=self)
        return self._collectives.run(call, None, async_op)


@dataclass(frozen=True)
class _Differences(Call):
    """Gathers what has changed since a module's parameters were gathered last.

    Attributes:
        module: has what was gathered, and takes what is.
    """

    module: Any = None

    def is_plain(self, scheme: Scheme) -> bool:
        return self.module.held is None or super().is_plain(scheme)

    def exchange(self, engine: Engine, layout: Layout, number: int, *, agree: bool) -> Exchange:
        held = self.module.held
        if self.is_plain(engine.scheme):
            yield from super().exchange(engine, layout, number, agree=agree)
            self.module.held = self.into.clone()
            return self.into
        # Until the exchange has ended: after one that failed, ranks may hold different values.
        self.module.held = None
        # NaN and infinity would stay in all differences. Every rank holds the same bits.
        held.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        wide = torch.promote_types(held.dtype, torch.float32)
        own = self.given - held.view(engine.world_size, -1)[engine.rank].to(wide)
        changed = Call("all_gather", own, torch.empty_like(held, dtype=wide))
        yield from changed.exchange(engine, layout, number, agree=agree)
        self.into.copy_(held.add_(changed.into))
        self.module.held = held
        return self.into


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device
