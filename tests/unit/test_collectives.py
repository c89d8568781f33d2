"""Collectives as requests: results, bytes, and how disagreement shows."""

from __future__ import annotations

from collections.abc import Callable
from math import nan

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from ddp_core import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Collective,
    MismatchError,
    ReduceScatter,
    RoundsError,
    Task,
    simulate,
)
from ddp_core.exchange._devices import as_bytes

SIZES = (1, 2, 3, 5)


def test_the_bytes_of_a_contiguous_tensor_are_its_memory() -> None:
    """A slice of one entry or none counts as contiguous, whatever its stride."""
    for tensor in (torch.ones(2, 3), torch.ones(9)[::7][:1], torch.ones(()), torch.ones(1)[1::4]):
        as_bytes(tensor).zero_()
        assert not tensor.any()
    turned = torch.arange(6.0).view(2, 3).t()
    assert_close(as_bytes(turned).view(torch.float32), turned.flatten())


def tensors(world_size: int, *shape: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(world_size)
    return [torch.randn(shape, generator=generator) for _ in range(world_size)]


def run(requests: list[Collective]) -> list[Tensor]:
    def exchange(request: Collective):
        return (yield request)

    return simulate([exchange(request) for request in requests])


@pytest.mark.parametrize("world_size", SIZES)
def test_all_reduce_is_mean_sum_or_maximum_in_place(world_size: int) -> None:
    given = tensors(world_size, 4, 3)
    stack = torch.stack(given)
    # Up to 5 float32 roundings of entries below 4.
    for op, expected in [("mean", stack.mean(0)), ("sum", stack.sum(0)), ("max", stack.amax(0))]:
        requests = [AllReduce(tensor.clone(), op) for tensor in given]
        for request, result in zip(requests, run(requests), strict=True):
            assert result is request.tensor
            assert_close(result, expected, rtol=0, atol=5 * 4 * 1.2e-7)


def test_the_mean_scales_before_it_sums() -> None:
    big = torch.full((3,), 60000.0, dtype=torch.float16)
    assert run([AllReduce(big.clone()) for _ in range(4)])[0].tolist() == [60000.0] * 3


@pytest.mark.parametrize("world_size", SIZES)
def test_all_gather_stacks_in_rank_order(world_size: int) -> None:
    given = tensors(world_size, 2, 3)
    results = run([AllGather(tensor) for tensor in given])
    assert all(torch.equal(result, torch.stack(given)) for result in results)
    results[0].zero_()
    assert world_size == 1 or results[1].any(), "ranks share no memory"


@pytest.mark.parametrize("world_size", SIZES)
def test_all_to_all_transposes_ranks_and_rows(world_size: int) -> None:
    given = tensors(world_size, world_size, 3)
    for rank, result in enumerate(run([AllToAll(tensor) for tensor in given])):
        assert torch.equal(result, torch.stack([tensor[rank] for tensor in given]))


@pytest.mark.parametrize("world_size", SIZES)
def test_reduce_scatter_sums_and_keeps_a_row(world_size: int) -> None:
    given = tensors(world_size, world_size, 3)
    for rank, result in enumerate(run([ReduceScatter(tensor.clone()) for tensor in given])):
        assert_close(result, torch.stack(given).sum(0)[rank], rtol=0, atol=5 * 4 * 1.2e-7)


@pytest.mark.parametrize("world_size", SIZES)
def test_broadcast_overwrites_with_the_sources(world_size: int) -> None:
    given = tensors(world_size, 3)
    source = world_size - 1
    results = run([Broadcast(tensor.clone(), source) for tensor in given])
    assert all(torch.equal(result, given[source]) for result in results)


@pytest.mark.parametrize("world_size", [1, 2, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.uint8])
def test_bytes_follow_the_bandwidth_optimal_algorithm(world_size: int, dtype: torch.dtype) -> None:
    payload = torch.zeros(world_size, 24, dtype=dtype)
    nbytes, share = payload.numel() * dtype.itemsize, (world_size - 1) / world_size
    # Ring: reduce-scatter and all-gather, n - 1 messages of 1/n each.
    assert AllReduce(payload, "sum").wire_nbytes(world_size) == nbytes * 2 * share
    # Every rank's whole payload passes n - 1 links.
    assert AllGather(payload).wire_nbytes(world_size) == nbytes * (world_size - 1)
    for request in (AllToAll(payload), ReduceScatter(payload), Broadcast(payload)):
        assert request.wire_nbytes(world_size) == nbytes * share
        assert request.payload_nbytes == nbytes


def test_sparse_payloads_count_indices_and_values() -> None:
    sparse = torch.tensor([0.0, 3, 0, 4]).to_sparse()
    assert AllReduce(sparse).payload_nbytes == 2 * 8 + 2 * 4


def test_like_keeps_what_is_asked_for() -> None:
    other = torch.zeros(2)
    assert AllReduce(torch.zeros(3), "max").like(other).op == "max"
    assert Broadcast(torch.zeros(3), 2).like(other).source == 2
    assert isinstance(AllGather(torch.zeros(3)).like(other), AllGather)


def test_an_unknown_operation_is_refused() -> None:
    with pytest.raises(ValueError, match="mean"):
        AllReduce(torch.zeros(1), "median")


@pytest.mark.parametrize(
    "other",
    [
        lambda: AllReduce(torch.zeros(4)),
        lambda: AllReduce(torch.zeros(3), "sum"),
        lambda: AllReduce(torch.zeros(3, dtype=torch.float16)),
        lambda: AllGather(torch.zeros(3)),
        lambda: Broadcast(torch.zeros(3)),
    ],
)
def test_ranks_with_different_collectives_raise_an_error(other: Callable[[], Collective]) -> None:
    with pytest.raises(
        MismatchError, match=r"round 0, rank 0 yields .*, rank 1 yields .* not on values"
    ):
        run([AllReduce(torch.zeros(3)), other()])


def test_broadcasts_from_different_sources_do_not_match() -> None:
    with pytest.raises(MismatchError):
        run([Broadcast(torch.zeros(3), 0), Broadcast(torch.zeros(3), 1)])


def test_a_rank_that_ends_early_is_an_error() -> None:
    def rounds(count: int):
        for _ in range(count):
            yield AllReduce(torch.zeros(1))

    with pytest.raises(MismatchError, match="round 1, 1 of 2 ranks ended"):
        simulate([rounds(1), rounds(2)])


def test_no_ranks_and_no_collectives_are_fine() -> None:
    def silent():
        return 5
        yield

    assert simulate([]) == []
    assert simulate([silent(), silent()]) == [5, 5]


# ---- one exchange under way


def make_task(exchange, rounds: int = 1) -> Task:
    return Task(exchange, step=4, bucket=2, dense_bytes=4, world_size=1, max_rounds=rounds)


def test_one_round_too_many_closes_the_exchange_and_says_so() -> None:
    closed = []

    def exchange():
        try:
            yield AllReduce(torch.zeros(1))
            yield AllReduce(torch.zeros(1))
        finally:
            closed.append(True)

    task = make_task(exchange())
    task.advance()
    assert task.advance() is None
    assert closed == [True]
    with pytest.raises(RoundsError, match=r"step 4, bucket 2.*number 2.*rounds=1"):
        task.outcome()


def test_a_failure_is_thrown_into_the_exchange_and_names_the_place() -> None:
    def exchange():
        try:
            yield AllReduce(torch.zeros(1))
        except RuntimeError as error:
            seen.append(str(error))
            raise

    seen: list[str] = []
    task = make_task(exchange())
    task.advance()
    assert task.advance(task.failed(OSError("reset by peer"))) is None
    assert "all_reduce failed in step 4, bucket 2, round 0: reset by peer" in seen[0]
    with pytest.raises(RuntimeError, match="reset by peer"):
        task.outcome()


def test_a_maximum_may_hide_a_nan() -> None:
    """On Gloo it may be lost, so that a scheme that relies on it fails in the simulation, too."""
    first, second = torch.tensor([nan, 1.0, nan]), torch.tensor([1.0, nan, nan])
    for result in run([AllReduce(first, "max"), AllReduce(second, "max")]):
        assert_close(result, torch.tensor([1.0, 1.0, nan]), equal_nan=True)
