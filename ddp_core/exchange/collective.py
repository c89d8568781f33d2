"""Defines ``Collective``, the base class of requests, and ``overlapped``, for work beside one."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, ClassVar

import torch.distributed as dist
from torch import Tensor

from ddp_core._torch import sparse_indices, sparse_values
from ddp_core.exchange.pairs import Pairs
from ddp_core.exchange.sparse_sum import SparseSum

__all__ = ["Collective", "Overlap", "as_request", "overlapped"]


class Overlap:
    """Holds work that needs no result of a collective, and runs it once.

    A driver that can calls ``run`` once the collective is under way. The exchange calls ``finish``
    after it, so that the work is done whatever drives it.

    Args:
        work: must not read or write the tensor of the request.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self._work: Callable[[], None] | None = work
        self._error: Exception | None = None

    def run(self) -> None:
        """Does the work, unless it is done; keeps what it raises for ``finish``."""
        work, self._work = self._work, None
        if work is None:
            return
        try:
            work()
        except Exception as error:  # of the exchange, and not of the driver
            self._error = error

    def finish(self) -> None:
        """Does the work, unless it is done, and raises what it has raised."""
        self.run()
        if self._error is not None:
            raise self._error

    def after(self, first: Callable[[], None]) -> Overlap:
        """Returns an overlap of ``first`` and then this, for a request that replaces its own."""

        def both() -> None:
            first()
            self.run()

        return Overlap(both)


class Collective:
    """Requests one collective over ``tensor``, as every rank does.

    ``sent`` is what this rank's contribution decodes to at the other end. None means the tensor
    itself, bit for bit; a wrapper that rounds what travels (a cast) writes the rounded value there
    before it passes the request on. ``overlap`` is work for while the collective is under way, see
    :func:`ddp_core.overlapped`.
    """

    name: ClassVar[str]

    def __init__(self, tensor: Tensor) -> None:
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"{type(self).__name__}(tensor) takes a tensor, got {type(tensor).__name__}"
            )
        self.tensor = tensor
        self.sent: Tensor | None = None
        self.overlap: Overlap | None = None

    @property
    def payload_nbytes(self) -> int:
        """Returns the bytes that this rank hands to the collective."""
        if self.tensor.is_sparse:  # indices travel as well, and entries that are zero do not
            parts = (sparse_indices(self.tensor), sparse_values(self.tensor))
            return sum(part.numel() * part.element_size() for part in parts)
        return self.tensor.numel() * self.tensor.element_size()

    def wire_nbytes(self, world_size: int) -> float:
        """Returns the bytes that this rank sends, by a bandwidth-optimal algorithm's formula."""
        raise NotImplementedError

    def issue(self, group: dist.ProcessGroup) -> dist.Work | Pairs | SparseSum:
        """Starts the collective on ``group`` and returns its work handle."""
        raise NotImplementedError

    def result(self) -> Tensor:
        """Returns what the scheme is sent back, once the work is done."""
        return self.tensor

    def run_overlap(self) -> None:
        """Does the work that is left for while the collective is under way, if there is any."""
        if self.overlap is not None:
            self.overlap.run()

    def like(self, tensor: Tensor) -> Collective:
        """Returns the same request over another tensor."""
        return type(self)(tensor)

    @classmethod
    def combine(cls, requests: Sequence[Any]) -> list[Tensor]:
        """Returns the results of all simulated ranks, given the requests of all."""
        raise NotImplementedError

    def signature(self) -> tuple[Any, ...]:
        """Returns what has to agree on all ranks."""
        return (self.name, tuple(self.tensor.shape), self.tensor.dtype)


def as_request(yielded: object) -> Collective:
    """Returns what an exchange yielded, if it is a collective.

    Raises:
        TypeError: it is something else, such as the tensor alone.
    """
    if not isinstance(yielded, Collective):
        raise TypeError(
            f"an exchange yields collectives, such as AllReduce(tensor), and is sent their "
            f"results; it yielded a {type(yielded).__name__}"
        )
    return yielded


def overlapped(
    request: Collective, work: Callable[[], None]
) -> Generator[Collective, Tensor, Tensor]:
    """Requests a collective, does ``work`` while it is under way, and returns its result.

    ``work`` runs once if the collective succeeds: in the lanes' thread, on a GPU on the stream of
    the exchange, or after the collective where nothing does it before. What it raises is raised
    here. If the collective fails, it may not have run.

    Args:
        request: the collective.
        work: must not read or write ``request.tensor``; may read ``request.sent``.

    Example:
        >>> import torch
        >>> from ddp_core import AllReduce, simulate
        >>> def average(x, kept):
        ...     return (yield from overlapped(AllReduce(x), lambda: kept.mul_(2)))
        >>> kept = torch.ones(1)
        >>> simulate([average(torch.ones(1), kept)]), kept
        ([tensor([1.])], tensor([2.]))
    """
    overlap = request.overlap = Overlap(work)
    try:
        result = yield request
    finally:
        request.overlap = None  # the work has the request: nothing would free both if this fails
    overlap.finish()
    return result
