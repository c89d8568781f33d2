"""The stream driver over a group whose ``wait`` blocks: results, records and errors."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddp_core import AllReduce, Collective, RoundRecord, Streams, Task
from tests.tools.harness import on_ranks

CPU = torch.device("cpu")


def two_means(value: float) -> Any:
    mean = yield AllReduce(torch.full((4,), value))
    return (yield AllReduce(mean * 10))


def raises_in_round_one() -> Any:
    yield AllReduce(torch.zeros(4))
    raise ValueError("this scheme cannot go on")


class Unplugged(Collective):
    """A collective whose link is broken."""

    name = "unplugged"

    def wire_nbytes(self, world_size: int) -> float:
        return 0.0

    def issue(self, group: dist.ProcessGroup) -> Any:
        raise RuntimeError("connection closed by peer")


def needs_the_link() -> Any:
    return (yield Unplugged(torch.zeros(4)))


def run(exchange: Any, world_size: int, rows: list[RoundRecord]) -> Any:
    task = Task(
        exchange, step=3, bucket=1, dense_bytes=16, world_size=world_size, max_rounds=2,
        record=rows.append,
    )  # fmt: skip
    group = dist.group.WORLD
    assert group is not None
    return Streams(group).run(task, CPU)


@on_ranks(3)
def test_an_exchange_runs_to_its_end_in_the_call(rank: int, world_size: int) -> None:
    rows: list[RoundRecord] = []
    result = run(two_means(float(rank)), world_size, rows).wait()
    assert result.tolist() == [10.0 * (world_size - 1) / 2] * 4
    assert [row.payload_bytes for row in rows] == [16, 16]


@on_ranks(2)
def test_a_failure_is_the_futures_and_names_the_place(world_size: int) -> None:
    for exchange, failure in (
        (raises_in_round_one, "step 3, bucket 1, round 1.*this scheme cannot go on"),
        (needs_the_link, "step 3, bucket 1, round 0.*connection closed by peer"),
    ):
        with pytest.raises(RuntimeError, match=failure):
            run(exchange(), world_size, []).wait()
