"""Collectives as requests: what a scheme yields, and what it is sent back.

A request says *what* travels. Where and when it is issued is the driver's business: in ticket
order on lanes (:mod:`ddp_core.exchange.lanes`), on a CUDA stream
(:mod:`ddp_core.exchange.streams`), or between simulated ranks in one process
(:mod:`ddp_core.exchange.simulate`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_core.exchange.collective import Collective, as_request
from ddp_core.exchange.lane_groups import backend_for, is_nccl
from ddp_core.exchange.pairs import Pairs, as_bytes, exchange_pairs, on_gloo
from ddp_core.exchange.sparse_sum import SparseSum, sums_sparse

__all__ = [
    "AllGather",
    "AllReduce",
    "AllToAll",
    "Broadcast",
    "Collective",
    "ReduceScatter",
    "as_request",
    "nccl_scales",
]

ReduceOp = Literal["mean", "sum", "max"]

_REDUCE_OPS = {
    "mean": dist.ReduceOp.SUM,  # scaled before the sum
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
}
_NCCL_SCALES = 2**20  # entries of a tensor, at most
# torch 2.13 renamed the tensor collectives; 2.11 only has the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _Among(Collective):
    """A collective of all ranks, or of those among ``ranks``.

    All ranks of the group ask for it at the same time, each with the ranks of its own part.
    """

    def __init__(self, tensor: Tensor, ranks: Sequence[int] | None = None) -> None:
        super().__init__(tensor)
        self.ranks = ranks

    def like(self, tensor: Tensor) -> Collective:
        return type(self)(tensor, self.ranks)

    def signature(self) -> tuple[Any, ...]:
        return (*super().signature(), None if self.ranks is None else len(self.ranks))

    def _size(self, world_size: int) -> int:
        return world_size if self.ranks is None else len(self.ranks)


class AllReduce(Collective):
    """Reduces ``tensor`` over all ranks, in place; ``op`` is "mean" (default), "sum" or "max".

    The mean multiplies by 1/n before the sum, as DistributedDataParallel does, so that a sum over
    many ranks does not overflow a 16-bit type and the result equals plain DDP bit for bit. On NCCL
    small tensors are multiplied within the collective: the same bits, and a launch less.
    """

    name = "all_reduce"

    def __init__(self, tensor: Tensor, op: ReduceOp = "mean") -> None:
        super().__init__(tensor)
        if op not in _REDUCE_OPS:
            raise ValueError(f"AllReduce(op=...) is one of {sorted(_REDUCE_OPS)}, got {op!r}")
        # Raised here on every rank, also in a simulation, where the product would be rounded;
        # torch refuses it later, within the collective.
        if op == "mean" and not (tensor.is_floating_point() or tensor.is_complex()):
            raise TypeError(
                f"AllReduce(tensor) is a mean, which a tensor of {tensor.dtype} cannot hold: use "
                f'AllReduce(tensor, "sum"), or AllGather(tensor)'
            )
        self.op: ReduceOp = op

    def wire_nbytes(self, world_size: int) -> float:
        return self.payload_nbytes * 2 * (world_size - 1) / world_size

    def issue(self, group: dist.ProcessGroup) -> dist.Work | SparseSum:
        op = _REDUCE_OPS[self.op]
        if self.op == "mean":
            if nccl_scales(self.tensor) and is_nccl(backend_for(group, self.tensor.device)):
                op = dist.ReduceOp.AVG
            else:
                self.tensor.mul_(1.0 / group.size())
        if self.tensor.is_sparse and not sums_sparse(group, self.tensor.device):
            if op != dist.ReduceOp.SUM:
                raise ValueError(f"AllReduce(tensor, {self.op!r}): a sparse tensor can be summed")
            return SparseSum(self.tensor, group)
        work: dist.Work = dist.all_reduce(self.tensor, op, group=group, async_op=True)
        return work

    def like(self, tensor: Tensor) -> AllReduce:
        return AllReduce(tensor, self.op)

    @classmethod
    def combine(cls, requests: Sequence[AllReduce]) -> list[Tensor]:
        op = requests[0].op
        tensors = [request.tensor for request in requests]
        if op == "mean":
            tensors = [tensor * (1.0 / len(tensors)) for tensor in tensors]
        total = tensors[0].clone()
        for tensor in tensors[1:]:
            # fmax: as on Gloo, the largest of numbers, whatever is not a number beside them.
            total = torch.fmax(total, tensor) if op == "max" else total + tensor
        for request in requests:  # in place, as the real collective is
            request.tensor.copy_(total)
        return [request.tensor for request in requests]

    def signature(self) -> tuple[Any, ...]:
        return (*super().signature(), self.op)


def nccl_scales(tensor: Tensor) -> bool:
    """Whether NCCL's own mean of such a tensor has the bits of one that is scaled before.

    It multiplies float32 entries by float32 1/n as it loads them, but 16-bit ones by 1/n rounded to
    16 bits. Its mean is not summed by switches (NVLink SHARP), so large tensors are scaled before.
    """
    dense = tensor.layout == torch.strided
    return dense and tensor.dtype == torch.float32 and tensor.numel() <= _NCCL_SCALES


class AllGather(_Among):
    """Gathers ``tensor`` of every rank; the result has shape ``(ranks, *tensor.shape)``.

    Args:
        ranks: only among these, this one's part of all ranks; see :class:`AllToAll`.
    """

    name = "all_gather"

    def wire_nbytes(self, world_size: int) -> float:
        others = world_size if self.ranks is None else len(set(self.ranks))
        return self.payload_nbytes * (others - 1)

    def issue(self, group: dist.ProcessGroup) -> dist.Work | Pairs:
        flat, size = self.tensor.contiguous().view(-1), self._size(group.size())
        self._result = flat.new_empty((size, *self.tensor.shape))
        # Gloo's own sends and receives in turn, see `pairs`; a part of a group has no other way.
        if self.ranks is not None or on_gloo(group, flat):
            rows = self._result.view(size, flat.numel()).unbind()
            return exchange_pairs([flat] * size, rows, group, self.ranks)
        into, sent = as_bytes(self._result), as_bytes(flat)
        work: dist.Work = _all_gather(into, sent, group=group, async_op=True)
        return work

    def result(self) -> Tensor:
        return self._result

    @classmethod
    def combine(cls, requests: Sequence[AllGather]) -> list[Tensor]:
        everyone = range(len(requests))
        return [
            torch.stack([requests[rank].tensor for rank in request.ranks or everyone])
            for request in requests
        ]


class AllToAll(_Among):
    """Sends row i of ``tensor`` (shape ``(ranks, ...)``) to rank i.

    Row j of the result is what rank j sent.

    Args:
        ranks: only among these, this one's part of all ranks, in an order that all of them know;
            rows count them. Every rank of the group asks for the collective, with its own part.
    """

    name = "all_to_all"

    def wire_nbytes(self, world_size: int) -> float:
        size = self._size(world_size)
        return self.payload_nbytes * (size - 1) / size

    def issue(self, group: dist.ProcessGroup) -> dist.Work | Pairs:
        size = self._size(group.size())
        if self.tensor.shape[0] != size:
            raise ValueError(
                f"AllToAll(tensor) needs one row per rank: {size} ranks, "
                f"got shape {tuple(self.tensor.shape)}"
            )
        source = self.tensor.contiguous()
        self._result = torch.empty_like(source)
        if self.ranks is not None or on_gloo(group, source):
            return exchange_pairs(source.unbind(), self._result.unbind(), group, self.ranks)
        into, sent = as_bytes(self._result), as_bytes(source)
        work: dist.Work = dist.all_to_all_single(into, sent, group=group, async_op=True)
        return work

    def result(self) -> Tensor:
        return self._result

    @classmethod
    def combine(cls, requests: Sequence[AllToAll]) -> list[Tensor]:
        everyone = range(len(requests))
        results = []
        for rank, request in enumerate(requests):
            ranks = request.ranks or everyone
            place = ranks.index(rank)
            results.append(torch.stack([requests[source].tensor[place] for source in ranks]))
        return results


class ReduceScatter(Collective):
    """Reduces ``tensor`` (shape ``(world_size, ...)``) over all ranks; rank i gets row i.

    Args:
        op: "sum" (default), or "mean", which is the backend's own average.
    """

    name = "reduce_scatter"

    def __init__(self, tensor: Tensor, op: Literal["mean", "sum"] = "sum") -> None:
        super().__init__(tensor)
        if op not in ("mean", "sum"):
            raise ValueError(f"ReduceScatter(op=...) is 'mean' or 'sum', got {op!r}")
        self.op = op

    def wire_nbytes(self, world_size: int) -> float:
        return self.payload_nbytes * (world_size - 1) / world_size

    def issue(self, group: dist.ProcessGroup) -> dist.Work | Pairs:
        if self.tensor.shape[0] != group.size():
            raise ValueError(
                f"ReduceScatter(tensor) needs one row per rank: {group.size()} ranks, "
                f"got shape {tuple(self.tensor.shape)}"
            )
        source = self.tensor.contiguous()
        self._result = source.new_empty(self.tensor.shape[1:])
        flat = source.view(-1)
        op = dist.ReduceOp.AVG if self.op == "mean" else dist.ReduceOp.SUM
        into = self._result.view(-1)
        work: dist.Work = _reduce_scatter(into, flat, op=op, group=group, async_op=True)
        # Gloo's work has no future.
        return Pairs([work], [flat, into]) if on_gloo(group, flat) else work

    def like(self, tensor: Tensor) -> ReduceScatter:
        return ReduceScatter(tensor, self.op)

    def signature(self) -> tuple[Any, ...]:
        return (*super().signature(), self.op)

    def result(self) -> Tensor:
        return self._result

    @classmethod
    def combine(cls, requests: Sequence[ReduceScatter]) -> list[Tensor]:
        total = requests[0].tensor.clone()
        for request in requests[1:]:
            total += request.tensor
        if requests[0].op == "mean":
            total /= len(requests)
        return [total[rank].clone() for rank in range(len(requests))]


class Broadcast(Collective):
    """Overwrites ``tensor`` on every rank with rank ``source``'s (a rank within the group)."""

    name = "broadcast"

    def __init__(self, tensor: Tensor, source: int = 0) -> None:
        super().__init__(tensor)
        self.source = source

    def wire_nbytes(self, world_size: int) -> float:
        return self.payload_nbytes * (world_size - 1) / world_size

    def issue(self, group: dist.ProcessGroup) -> dist.Work:
        source = self.source
        work: dist.Work = dist.broadcast(self.tensor, group=group, group_src=source, async_op=True)
        return work

    def like(self, tensor: Tensor) -> Broadcast:
        return Broadcast(tensor, self.source)

    @classmethod
    def combine(cls, requests: Sequence[Broadcast]) -> list[Tensor]:
        value = requests[requests[0].source].tensor.clone()
        for request in requests:
            request.tensor.copy_(value)
        return [request.tensor for request in requests]

    def signature(self) -> tuple[Any, ...]:
        return (*super().signature(), self.source)
