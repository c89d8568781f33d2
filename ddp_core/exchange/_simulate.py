"""Runs the exchange generators of n simulated ranks in one process, without a group."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TypeVar

from torch import Tensor

from ddp_core.exchange._collectives import Collective, as_request
from ddp_core.exchange._errors import MismatchError

__all__ = ["simulate"]

T = TypeVar("T")


def simulate(ranks: Sequence[Generator[Collective, Tensor, T]]) -> list[T]:
    """Runs one exchange of every rank in lock step; returns what each rank's generator returned.

    Args:
        ranks: the generator of each rank, in rank order.

    Raises:
        MismatchError: the ranks ask for different collectives, or some end before others.

    Example:
        >>> import torch
        >>> def average(x):
        ...     return (yield AllReduce(x))
        >>> simulate([average(torch.tensor([1.0])), average(torch.tensor([3.0]))])
        [tensor([2.]), tensor([2.])]
    """
    answers: list[Tensor | None] = [None] * len(ranks)
    round = 0
    while True:
        requests: list[Collective] = []
        returned: list[T] = []
        for rank, answer in zip(ranks, answers, strict=True):
            try:
                # A generator that has not begun takes no answer.
                requests.append(as_request(next(rank) if answer is None else rank.send(answer)))
            except StopIteration as stop:
                returned.append(stop.value)
        if requests and returned:
            raise MismatchError(
                f"simulate: in round {round}, {len(returned)} of {len(ranks)} ranks ended their "
                f"exchange while the others yield {requests[0].name}"
            )
        if not requests:
            return returned
        signatures = [request.signature() for request in requests]
        for rank_index, signature in enumerate(signatures):
            if signature != signatures[0]:
                raise MismatchError(
                    f"simulate: in round {round}, rank 0 yields {signatures[0]}, "
                    f"rank {rank_index} yields {signature}. Names, shapes and dtypes of what is "
                    f"sent may depend on the shapes of a bucket and on the step, not on values"
                )
        # On even ranks before the collective and on odd ones after it: work that touches the tensor
        # of its request shows.
        for request in requests[::2]:
            request.run_overlap()
        answers = list(type(requests[0]).combine(requests))
        for request in requests[1::2]:
            request.run_overlap()
        round += 1
