"""Compresses the all-gather of FSDP2's parameters before forward and backward.

The owner of a shard keeps and updates it in full precision; what all ranks compute with is rounded,
the same on every rank (Wang et al., ZeRO++, 2023: quantised weights).

With tensor parallelism a module may have shards of cut parameters, and parameters that are not cut
(norms, biases of row-wise layers). The latter are equal on the tensor-parallel ranks, and have to
stay equal: in one block with a shard they would be rounded differently on each rank. They are sent
uncompressed.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from commhooks._torch import AllGather as FSDP2AllGather
from commhooks._torch import (
    DefaultAllGather,
    DefaultAllocMixin,
    dtensor_spec_before,
    fsdp2_gather,
    set_fsdp2_gather,
)
from commhooks.checkpoint._placement import shard_spec_of
from commhooks.collectives._calls import CollectiveCall, write_into
from commhooks.collectives._functions import Collectives
from commhooks.core._dense import Dense
from commhooks.core._layout import Layout
from commhooks.core._scheme import Scheme, walk
from commhooks.errors import RegistrationError
from commhooks.fsdp._fsdp2 import FSDP2Model
from commhooks.hook._engine import Engine
from commhooks.hook._state import asks_for_scheme
from commhooks.kernels import FORMATS
from commhooks.schemes.casts import TwoPhaseCast
from commhooks.schemes.quantized import Blockwise
from commhooks.wrappers._cast import Cast
from commhooks.wrappers._make import make
from ddp_core import AllGather, Collective, Exchange
from ddp_core.exchange._devices import as_bytes

__all__ = ["gather_parameters"]


_FEWEST_BITS = 4


def gather_parameters(
    model: nn.Module, scheme: str | Scheme = "int8", *, seed: int = 0
) -> GatheredParameters:
    """Makes FSDP2 gather parameters by a scheme; all ranks call it, after the last ``fully_shard``.

    Args:
        model: a model of FSDP2.
        scheme: a name, which rounds to nearest here (not "int4", whose rotation is random), or a
            scheme of 4 bits or more that keeps no memory and rounds equal values equally: forward
            and backward have to compute with the same weights.
        seed: base of random draws, the same on every rank.

    Returns:
        The collectives that gather, with ledger and reports. After ``close()`` FSDP2 gathers by
        itself.

    Raises:
        RegistrationError: the scheme keeps memory, draws random bits, drops entries or sends fewer
            than 4 bits of each, or the model is not one of FSDP2, or gathers in another way
            already.

    Example:
        >>> gathered = commhooks.fsdp.gather_parameters(model)
    """
    built = _deterministic(scheme)
    fsdp2_model = FSDP2Model.of(model, "gather_parameters")
    groups = [module.group for module in fsdp2_model.modules]
    present = [fsdp2_gather(group) for group in groups]
    if any(type(gather) is not DefaultAllGather for gather in present):
        raise RegistrationError(
            f"gather_parameters: FSDP2 gathers by {type(present[0]).__name__} already "
            f"(gather_parameters, set_custom_all_gather, set_symm_mem_for_comm or "
            f"set_allocate_memory_from_process_group_for_comm), in whose place the scheme would be"
        )
    return GatheredParameters(built, groups, seed=seed)


class GatheredParameters(Collectives):
    """Gathers the parameters of FSDP2 modules; see :func:`gather_parameters`.

    Args:
        scheme, seed: see :class:`commhooks.Collectives`.
        groups: FSDP2's groups of parameters, which gather by the scheme from now on.
    """

    def __init__(self, scheme: Scheme, groups: Sequence[Any], *, seed: int) -> None:
        # Not those of the reduce-scatter, which may have a group of its own.
        ranks = groups[0].mesh_info.shard_process_group
        super().__init__(scheme, ranks, seed=seed)
        self.fixed_group_reason = (
            "FSDP2 decides over which ranks it gathers; shard a model over the others"
        )
        self._groups = groups
        for group in groups:
            set_fsdp2_gather(group, SchemeAllGather(self, group))

    @asks_for_scheme
    def switch(self, scheme: str | Scheme, **options: Any) -> None:
        """Gathers by another scheme from the next call on; "none" sends parameters as they are."""
        super().switch(_deterministic(make(scheme, **options) if options else scheme))

    def close(self) -> None:
        """Ends all calls; FSDP2 gathers by itself from then on. Safe to call twice."""
        for group in self._groups:
            set_fsdp2_gather(group, DefaultAllGather())
        self._groups = ()
        super().close()


def _deterministic(scheme: str | Scheme) -> Scheme:
    """Makes a scheme; raises unless it rounds equal values equally, without feedback."""
    built = _to_nearest(scheme) if isinstance(scheme, str) else make(scheme)
    inside = list(walk(built))
    random = any(getattr(part, name, False) for part in inside for name in ("stochastic", "rotate"))
    if random or not all(
        isinstance(part, Dense | Cast | TwoPhaseCast | Blockwise) for part in inside
    ):
        raise RegistrationError(
            f"gather_parameters: {built} keeps state, draws random bits or drops entries, so that "
            f"forward and backward would have different weights; take a name such as none, bf16, "
            f"int8 or fp8, or blocks that are rounded to nearest without rotation, such as "
            f'make("int8", rounding="nearest", error_feedback=False)'
        )
    for part in inside:
        if isinstance(part, Blockwise) and FORMATS[part.format].bits < _FEWEST_BITS:
            raise RegistrationError(
                f"gather_parameters: {built} sends fewer than {_FEWEST_BITS} bits of an entry, too "
                f"few for a model to compute with; take none, bf16, fp16, int8 or fp8"
            )
    return built


def _to_nearest(name: str) -> Scheme:
    """Makes the scheme of a name without feedback and without random rounding."""
    built = make(name, error_feedback=False)
    return built.to_nearest() if isinstance(built, Blockwise) else built


class SchemeAllGather(DefaultAllocMixin, FSDP2AllGather):
    """Gathers the parameters of one FSDP2 module.

    Args:
        collectives: runs the gathers.
        group: FSDP2's group of the module's parameters.
    """

    def __init__(self, collectives: Collectives, group: Any) -> None:
        self._collectives, self._packing = collectives, Packing.of(group)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Any:
        if group.size() != self._collectives.world_size:
            # What the forward pass has left on a part of the ranks (reshard_after_forward=8), which
            # was rounded when it was gathered.
            return DefaultAllGather()(output_tensor, input_tensor, group, async_op)
        call = GatherPacked("all_gather", input_tensor, output_tensor, packing=self._packing)
        return self._collectives.run(call, None, async_op)


@dataclass(frozen=True)
class Packing:
    """Divides a rank's shard into entries that a codec packs and entries that are sent exactly.

    Attributes:
        runs: runs of successive entries: number of entries, and whether they are packed.
    """

    runs: tuple[tuple[int, bool], ...] = ()

    @classmethod
    def of(cls, group: Any) -> Packing:
        """Returns the packing of an FSDP2 parameter group, a run for each parameter.

        A parameter is packed if it is cut between all ranks between which any parameter of the
        group is cut. So all are packed without tensor parallelism, and if it cuts all parameters of
        the group or none: with none, tensor-parallel ranks pack equal messages.
        """
        cuts = [
            shard_spec_of(dtensor_spec_before(parameter)).shard_groups
            for parameter in group.fsdp_params
        ]
        every: frozenset[tuple[int, ...]] = frozenset().union(*cuts)
        numels = [parameter.padded_sharded_param_size.numel() for parameter in group.fsdp_params]
        return cls(tuple((n, cut == every) for n, cut in zip(numels, cuts, strict=True)))

    @property
    def is_mixed(self) -> bool:
        """Whether some entries are not packed."""
        return not all(packed for _, packed in self.runs)

    def fit(self, numel: int) -> bool:
        """Whether the runs have ``numel`` entries in total, and some are packed."""
        packed = sum(n for n, packed in self.runs if packed)
        return packed > 0 and sum(n for n, _ in self.runs) == numel

    def select(self, shard: Tensor, *, packed: bool) -> Tensor:
        """Returns the entries that are packed, or those that are not."""
        pieces = shard.split([n for n, _ in self.runs])
        return torch.cat(
            [
                piece
                for piece, (_, is_packed) in zip(pieces, self.runs, strict=True)
                if is_packed == packed
            ]
        )

    def merge(self, packed: Tensor, exact: Tensor) -> Tensor:
        """Inverts :meth:`select` on the shards of all ranks, a row for each."""
        pieces = {
            packs: iter(rows.split([n for n, kind in self.runs if kind == packs], dim=1))
            for packs, rows in ((True, packed), (False, exact))
        }
        return torch.cat([next(pieces[packs]) for _, packs in self.runs], dim=1)


@dataclass(frozen=True)
class GatherPacked(CollectiveCall):
    """Describes an all-gather in which some entries are sent uncompressed, in the same message.

    Attributes:
        packing: packing of ``input``.
    """

    packing: Packing = Packing()

    def is_plain(self, scheme: Scheme) -> bool:
        # A tensor of the user's own form (``fsdp_pre_all_gather``) does not say which entries are
        # whose.
        unknown = self.packing.is_mixed and not self.packing.fit(self.input.numel())
        return unknown or super().is_plain(scheme)

    def exchange(self, engine: Engine, layout: Layout, number: int, *, agree: bool) -> Exchange:
        packing, ranks = self.packing, engine.world_size
        if packing.fit(self.input.numel()):
            layout = _layout(packing, layout.names[0], ranks)
        if self.is_plain(engine.scheme) or not packing.is_mixed:
            return (yield from super().exchange(engine, layout, number, agree=agree))
        packed, exact = (packing.select(self.input, packed=this) for this in (True, False))
        into = packed.new_empty(ranks * packed.numel())
        exchange = CollectiveCall("all_gather", packed, into).exchange(
            engine, layout, number, agree=agree
        )
        exact_rows = yield from _append_exact(exchange, exact)
        write_into(
            self.output, packing.merge(into.view(ranks, -1), exact_rows).view(self.output.shape)
        )
        return self.output


@lru_cache(maxsize=4096)  # one for each module
def _layout(packing: Packing, name: str, ranks: int) -> Layout:
    """Returns the layout of all ranks' packed entries, so that blocks begin at parameters."""
    shapes = [(n,) for n, packed in packing.runs if packed] * ranks
    return Layout([f"{name}/{index}" for index in range(len(shapes))], shapes)


def _append_exact(exchange: Exchange, exact: Tensor) -> Generator[Collective, Tensor, Tensor]:
    """Runs an exchange of one all-gather, and appends ``exact`` to its message.

    Returns ``exact`` of all ranks, a row for each.
    """
    with closing(exchange):  # also where the collective fails
        message = next(exchange).tensor
        arrived: Tensor = yield AllGather(torch.cat([as_bytes(message), as_bytes(exact)]))
        rows, exact_bytes = arrived.split([message.nbytes, exact.nbytes], dim=1)
        # Copies: a row may begin at an address that no wider dtype can be viewed at.
        exact_rows: Tensor = exact_bytes.contiguous().view(exact.dtype)
        try:
            exchange.send(rows.contiguous().view(message.dtype).view(-1, *message.shape))
        except StopIteration:
            return exact_rows
        raise AssertionError("schemes gather by one collective")
