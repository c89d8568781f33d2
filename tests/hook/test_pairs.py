"""All-to-all and all-gather by messages between pairs of ranks, on Gloo."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import commhooks
from ddp_core import AllGather, AllToAll
from ddp_core.exchange import _collectives as collectives
from ddp_core.exchange import _pairs as pairs
from ddp_core.exchange._pairs import Pairs, on_gloo
from tests.tools.harness import on_ranks, run_ranks
from tests.tools.training import ddp, equal_on_all_ranks, mlp, parameters, train

SHAPES = ((), (0,), (1,), (1001,), (3, 5))


@on_ranks(4)
def test_rows_arrive_where_they_belong(rank: int, world_size: int) -> None:
    for ranks in (1, 3, world_size):
        members = range(ranks)
        group = dist.new_group(list(members))
        if rank < ranks:
            _rows_arrive(rank, ranks, group)


def _rows_arrive(rank: int, world_size: int, group: dist.ProcessGroup) -> None:
    assert on_gloo(group, torch.empty(0))
    for dtype in (torch.uint8, torch.float32, torch.bfloat16):
        for shape in SHAPES:
            rows = [torch.full(shape, 10 * rank + i).to(dtype) for i in range(world_size)]
            to_all, gather = AllToAll(torch.stack(rows)), AllGather(rows[0])
            works = [request.issue(group) for request in (to_all, gather)]  # both under way
            for work in works:
                assert isinstance(work, Pairs)
            works[1].wait()
            works[0].get_future().wait()
            senders = [torch.full(shape, 10 * i).to(dtype) for i in range(world_size)]
            assert torch.equal(gather.result(), torch.stack(senders))
            sent = [torch.full(shape, 10 * i + rank).to(dtype) for i in range(world_size)]
            assert torch.equal(to_all.result(), torch.stack(sent))


@on_ranks(2)
def test_what_is_only_moved_travels_as_bytes(rank: int, world_size: int) -> None:
    """By the collectives that NCCL runs."""
    types = set()
    all_gather, all_to_all = collectives._all_gather, dist.all_to_all_single

    def noting(collective: Any) -> Any:
        def call(into: torch.Tensor, sent: torch.Tensor, **options: Any) -> Any:
            types.update((into.dtype, sent.dtype))
            return collective(into, sent, **options)

        return call

    batch = dist.batch_isend_irecv

    def noting_messages(messages: list[Any]) -> Any:
        types.update(message.tensor.dtype for message in messages)
        return batch(messages)

    with (
        mock.patch.object(collectives, "on_gloo", return_value=False),
        mock.patch.object(pairs, "on_gloo", return_value=False),
        mock.patch.object(dist, "batch_isend_irecv", noting_messages),
        mock.patch.object(collectives, "_all_gather", noting(all_gather)),
        mock.patch.object(dist, "all_to_all_single", noting(all_to_all)),
    ):
        for dtype in (torch.int16, torch.uint8, torch.bool, torch.complex64, torch.bfloat16):
            rows = torch.tensor([[10 * rank + i, 1] for i in range(world_size)]).to(dtype)
            some = range(world_size)  # as messages between pairs
            requests = AllGather(rows), AllToAll(rows), AllGather(rows, some), AllToAll(rows, some)
            for request in requests:
                request.issue(dist.group.WORLD).wait()
                everyone = [
                    torch.tensor([[10 * other + i, 1] for i in range(world_size)]).to(dtype)
                    for other in range(world_size)
                ]
                expected = torch.stack(everyone)
                if isinstance(request, AllToAll):
                    expected = expected[:, rank]
                assert torch.equal(request.result(), expected)
    assert types == {torch.uint8}


@on_ranks(4)
def test_parts_of_the_ranks_exchange_among_themselves(rank: int) -> None:
    """Both collectives, in each of two ways to part four ranks."""
    group = dist.group.WORLD
    for ranks in (range(rank // 2 * 2, rank // 2 * 2 + 2), range(rank % 2, 4, 2)):
        place = ranks.index(rank)
        for request, expected in (
            (AllGather(torch.tensor([rank]), ranks), [*ranks]),
            (
                AllToAll(torch.tensor([[10 * rank], [10 * rank + 1]]), ranks),
                [10 * other + place for other in ranks],
            ),
        ):
            request.issue(group).wait()
            assert request.result().flatten().tolist() == expected


@on_ranks(4)
def test_two_levels_of_four_ranks_agree_bit_for_bit(rank: int) -> None:
    model = ddp(mlp())
    hook = commhooks.register(model, "sdp4bit", local_size=2, between_block=64)
    train(model, rank, range(6), lr=0.001)
    assert hook.report()["round"].max() == 3
    assert equal_on_all_ranks(parameters(model))


@on_ranks(4)
def test_ranks_that_count_nodes_differently_raise_an_error(rank: int) -> None:
    nodes = mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="2" if rank else "4")
    with nodes, pytest.raises(commhooks.errors.MismatchError, match="ranks of a node"):
        commhooks.register(ddp(mlp()), "sdp4bit")


@on_ranks(2)
def test_messages_of_many_collectives_are_not_mixed_up(rank: int) -> None:
    """Fifty gathers that are all under way: each gets its own rank's answer."""
    group = dist.group.WORLD
    assert group is not None
    requests = [AllGather(torch.full((2000,), 100 * rank + i)) for i in range(50)]
    futures = [request.issue(group).get_future() for request in requests]
    for future in reversed(futures):
        future.wait()
    answers = [int(request.result()[1 - rank, 7]) for request in requests]
    assert answers == [100 * (1 - rank) + i for i in range(50)]


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


@on_ranks(4)
def test_gloo_sends_a_gpus_tensors_through_the_host(rank: int) -> None:
    """As Gloo could not read them itself."""
    group = dist.group.WORLD
    assert pairs.carried_by_host(group, torch.device("cuda"))
    assert not pairs.carried_by_host(group, torch.device("cpu"))
    partner = [rank, rank ^ 1] if rank < rank ^ 1 else [rank ^ 1, rank]
    rows = torch.tensor([[10.0 * rank, peer] for peer in partner])
    request = AllToAll(rows, partner)
    sent: list[int] = []
    messages = pairs._real

    def note(tensor: torch.Tensor) -> torch.Tensor:
        sent.append(tensor.untyped_storage().data_ptr())
        return messages(tensor)

    with (
        # Of the GPU's tensors first, then of their copies.
        mock.patch.object(pairs, "carried_by_host", side_effect=[True, False]),
        mock.patch.object(pairs, "_real", note),
    ):
        work = request.issue(group)
        work.wait()
    expected = torch.tensor([[10.0 * peer, rank] for peer in partner])
    assert torch.equal(request.result(), expected)
    assert sent
    assert request.result().untyped_storage().data_ptr() not in sent


_ENDS_AT_ONCE = """
import time
from ddp_core.exchange._pairs import future_after

class Messages:
    def __call__(self):
        time.sleep(0.3)  # until only the thread has the messages

    def __del__(self):
        time.sleep(0.3)
        print("dropped", flush=True)

future_after(Messages(), "waiter").wait()
"""


def test_messages_are_dropped_before_the_interpreter_ends() -> None:
    """A daemon that drops a tensor later aborts the process ("terminate called ...")."""
    ended = subprocess.run([sys.executable, "-c", _ENDS_AT_ONCE], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, "dropped\n"), ended.stderr
