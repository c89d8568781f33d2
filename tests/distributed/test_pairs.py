"""All-to-all and all-gather by messages between pairs of ranks, on Gloo."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddp_core import AllGather, AllToAll
from ddp_core._pairs import Pairs, on_gloo
from tests.distributed.harness import run_ranks

SHAPES = ((), (0,), (1,), (1001,), (3, 5))


def _exchange(rank: int, world_size: int) -> list[bool]:
    group = dist.group.WORLD
    assert group is not None
    assert on_gloo(group, torch.empty(0))
    right = []
    for dtype in (torch.uint8, torch.float32, torch.bfloat16):
        for shape in SHAPES:
            rows = [torch.full(shape, 10 * rank + i).to(dtype) for i in range(world_size)]
            to_all, gather = AllToAll(torch.stack(rows)), AllGather(rows[0])
            works = [request.issue(group) for request in (to_all, gather)]  # both under way
            for work in works:
                assert isinstance(work, Pairs)
            works[1].wait()
            works[0].get_future().wait()
            expected = torch.stack(
                [torch.full(shape, 10 * i + rank).to(dtype) for i in range(world_size)]
            )
            right.append(torch.equal(to_all.result(), expected))
            expected = torch.stack([torch.full(shape, 10 * i).to(dtype) for i in range(world_size)])
            right.append(torch.equal(gather.result(), expected))
    return right


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_rows_arrive_where_they_belong(world_size: int) -> None:
    for right in run_ranks(_exchange, world_size):
        assert all(right)


def _many(rank: int, world_size: int) -> list[int]:
    """Fifty gathers that are all under way: each gets its own rank's answer."""
    group = dist.group.WORLD
    assert group is not None
    requests = [AllGather(torch.full((2000,), 100 * rank + i)) for i in range(50)]
    futures = [request.issue(group).get_future() for request in requests]
    for future in reversed(futures):
        future.wait()
    return [int(request.result()[1 - rank, 7]) for request in requests]


def test_messages_of_many_collectives_are_not_mixed_up() -> None:
    mine, theirs = run_ranks(_many, 2)
    assert mine == [100 + i for i in range(50)]
    assert theirs == list(range(50))


def _orphan(rank: int, world_size: int) -> Any:
    group = dist.group.WORLD
    assert group is not None
    if rank == 1:
        return "gone"
    try:
        AllGather(torch.ones(5)).issue(group).get_future().wait()
    except Exception as error:  # at once, or when nothing comes
        return type(error).__name__
    return "arrived"


def test_a_peer_that_is_gone_is_an_error_not_a_hang() -> None:
    left, gone = run_ranks(_orphan, 2)
    assert gone == "gone"
    assert left == "RuntimeError"
