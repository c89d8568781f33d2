"""Gathers some entries of an FSDP2 module as they are, beside those that a codec packs.

Beside tensor parallelism a module may have pieces of cut parameters and parameters that are not cut
(norms, biases of row-wise layers). The latter are equal on the ranks of tensor parallelism, and
have to stay so: in a block with a piece they would be rounded differently on each.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from commhooks._torch import dtensor_spec_before
from commhooks.checkpoint.placement import cut_of
from commhooks.core.bytes import as_bytes
from commhooks.core.layout import Layout
from commhooks.core.scheme import Scheme
from commhooks.hook.call import Call, write_into
from commhooks.hook.engine import Engine
from ddp_core import AllGather, Collective, Exchange

__all__ = ["GatherPacked", "Packing"]


@dataclass(frozen=True)
class Packing:
    """Tells which entries of a rank's shard a codec packs; the others travel exactly.

    Attributes:
        runs: of successive entries: how many they are, and whether they are packed.
    """

    runs: tuple[tuple[int, bool], ...] = ()

    @classmethod
    def of(cls, group: Any) -> Packing:
        """Returns the packing of FSDP2's group of parameters, a run for each.

        A parameter is packed if it is cut between all the ranks between which any of its group is.
        So all is packed without tensor parallelism, and where it cuts all or none of a group: in
        the latter case its ranks pack equal messages.
        """
        cuts = [cut_of(dtensor_spec_before(one)).between for one in group.fsdp_params]
        every: frozenset[tuple[int, ...]] = frozenset().union(*cuts)
        numels = [one.padded_sharded_param_size.numel() for one in group.fsdp_params]
        return cls(tuple((n, cut == every) for n, cut in zip(numels, cuts, strict=True)))

    @property
    def mixed(self) -> bool:
        """Whether some entries are not packed."""
        return not all(packed for _, packed in self.runs)

    def fit(self, numel: int) -> bool:
        """Whether these are runs of so many entries, of which some are packed."""
        packed = sum(n for n, packed in self.runs if packed)
        return packed > 0 and sum(n for n, _ in self.runs) == numel

    def layout(self, name: str, ranks: int) -> Layout:
        """Returns the layout of the packed entries of all ranks, which have equally many.

        Args:
            name: its parameters are called ``name/0``, ``name/1`` and so on.
        """
        return _layout(self, name, ranks)

    def take(self, rows: Tensor, *, packed: bool) -> Tensor:
        """Returns the entries of each row that are packed, or the others; ``rows`` if it is all."""
        if not self.mixed:
            return rows if packed else rows[..., :0]
        pieces = rows.split([n for n, _ in self.runs], dim=-1)
        chosen = [one for one, (_, this) in zip(pieces, self.runs, strict=True) if this == packed]
        return torch.cat(chosen, dim=-1)

    def joined(self, packed: Tensor, exact: Tensor) -> Tensor:
        """Undoes :meth:`take`: returns the rows that have these entries."""
        pieces = {
            this: iter(rows.split([n for n, kind in self.runs if kind == this], dim=-1))
            for this, rows in ((True, packed), (False, exact))
        }
        return torch.cat([next(pieces[this]) for _, this in self.runs], dim=-1)


@lru_cache(maxsize=4096)  # one for each module
def _layout(packing: Packing, name: str, ranks: int) -> Layout:
    shapes = [(n,) for n, packed in packing.runs if packed] * ranks
    return Layout([f"{name}/{index}" for index in range(len(shapes))], shapes)


@dataclass(frozen=True)
class GatherPacked(Call):
    """Describes an all-gather of which some entries travel as they are, in the same message.

    Attributes:
        packing: of ``given``.
    """

    packing: Packing = Packing()

    def is_plain(self, scheme: Scheme) -> bool:
        # A tensor of the user's own form (``fsdp_pre_all_gather``) does not say which entries are
        # whose.
        unknown = self.packing.mixed and not self.packing.fit(self.given.numel())
        return unknown or super().is_plain(scheme)

    def exchange(self, engine: Engine, layout: Layout, number: int, *, agree: bool) -> Exchange:
        if self.is_plain(engine.scheme) or not self.packing.mixed:
            layout = self._packed_layout(layout, engine.world_size)
            return (yield from super().exchange(engine, layout, number, agree=agree))
        packed, exact = (self.packing.take(self.given, packed=this) for this in (True, False))
        rows = yield from self.gather(engine, layout, number, packed, exact, agree=agree)
        write_into(self.into, self.packing.joined(*rows).view(self.into.shape))
        return self.into

    def _packed_layout(self, layout: Layout, ranks: int) -> Layout:
        """Returns where each parameter's packed entries are; ``layout`` where that is unknown."""
        if not self.packing.fit(self.given.numel()):
            return layout
        return self.packing.layout(layout.names[0], ranks)

    def gather(
        self,
        engine: Engine,
        layout: Layout,
        number: int,
        packed: Tensor,
        exact: Tensor,
        *,
        agree: bool,
    ) -> Generator[Collective, Tensor, tuple[Tensor, Tensor]]:
        """Gathers ``packed`` by the scheme and ``exact`` as it is; returns rows, one for a rank."""
        into = packed.new_empty(engine.world_size * packed.numel())
        layout = self._packed_layout(layout, engine.world_size)
        exchange = Call("all_gather", packed, into).exchange(engine, layout, number, agree=agree)
        if exact.numel():
            others = yield from _beside(exchange, exact)
        else:
            others = exact.new_empty(engine.world_size, 0)
            yield from exchange
        return into.view(engine.world_size, -1), others


def _beside(exchange: Exchange, exact: Tensor) -> Generator[Collective, Tensor, Tensor]:
    """Runs an exchange of one all-gather, and sends ``exact`` at the end of its message.

    Returns what all ranks have sent as ``exact``, a row for each.
    """
    with closing(exchange):  # also where the collective fails
        own = next(exchange).tensor
        arrived: Tensor = yield AllGather(torch.cat([as_bytes(own), as_bytes(exact)]))
        rows, others = arrived.split([own.nbytes, exact.nbytes], dim=1)
        # Copies: a row may begin at an address that no wider dtype can be viewed at.
        beside: Tensor = others.contiguous().view(exact.dtype)
        try:
            exchange.send(rows.contiguous().view(own.dtype).view(-1, *own.shape))
        except StopIteration:
            return beside
        raise AssertionError("schemes gather by one collective")
