"""The sum of sparse tensors on backends that sum dense ones only (NCCL): by gathering the parts."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_core._torch import number_of_entries, sparse_indices, sparse_values
from ddp_core.exchange.lane_groups import backend_for, is_gloo
from ddp_core.exchange.pairs import future_after

__all__ = ["SparseSum", "sums_sparse"]

# torch 2.13 renamed it; 2.11 only has the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def sums_sparse(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether an all-reduce of ``group`` takes sparse tensors of ``device``: only Gloo's does."""
    return is_gloo(backend_for(group, device))


class SparseSum:
    """Sums a sparse tensor over all ranks, in place; waited for as ``dist.Work`` is.

    Indices and values of all ranks are gathered and added in rank order, as Gloo adds them. The
    number of entries differs between ranks and decides the size of messages, so the host waits for
    these numbers.

    Args:
        tensor: a sparse COO tensor; receives the sum, coalesced.
        group: ranks.
    """

    def __init__(self, tensor: Tensor, group: dist.ProcessGroup) -> None:
        self._tensor, self._lock = tensor, threading.Lock()
        own = tensor.coalesce()
        indices, values = sparse_indices(own), sparse_values(own)
        mine = torch.full((1,), number_of_entries(own), dtype=torch.int64, device=values.device)
        counts, work = _gather(mine, group)
        work.wait()
        self._counts: list[int] = counts.view(-1).tolist()
        most = max(self._counts)
        # Every rank sends as many entries; those above its own number are not looked at.
        padded = indices.new_zeros(most, indices.shape[0])
        padded[: number_of_entries(own)] = indices.t()
        filled = values.new_zeros(most, *values.shape[1:])
        filled[: number_of_entries(own)] = values
        self._parts = [_gather(part, group) for part in (padded, filled)] if most else []

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Waits for the parts and writes the sum; on a GPU both are only enqueued."""
        for _, work in self._parts:
            work.wait() if timeout is None else work.wait(timeout)
        with self._lock:  # a future's thread waits, too
            parts, self._parts = self._parts, []
            if parts:
                self._add(*(everyone for everyone, _ in parts))
        return True

    def _add(self, indices: Tensor, values: Tensor) -> None:
        total: Tensor | None = None
        for rank, count in enumerate(self._counts):
            part = torch.sparse_coo_tensor(
                indices[rank, :count].t(),
                values[rank, :count],
                self._tensor.shape,
                check_invariants=False,
                is_coalesced=True,
            )
            total = part if total is None else total + part
        assert total is not None
        self._tensor.copy_(total.coalesce())

    def get_future(self) -> torch.futures.Future[Any]:
        """Completes when the sum is written; an error is what its value raises."""
        return future_after(self.wait, "commhooks-sparse-sum")

    def is_completed(self) -> bool:
        """Whether ``wait`` would return at once."""
        return all(work.is_completed() for _, work in self._parts)


def _gather(tensor: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Any]:
    """Returns the tensors of all ranks, one per row, and the work to wait for."""
    everyone = tensor.new_empty(group.size(), *tensor.shape)
    return everyone, _all_gather(everyone.view(-1), tensor.view(-1), group=group, async_op=True)
