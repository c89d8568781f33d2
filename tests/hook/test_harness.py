"""The harness of the distributed tests itself."""

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import commhooks
from commhooks.core import _registry
from tests.tools.harness import Died, RankError, on_ranks, run_ranks


def _sum(rank, world_size, offset):
    total = torch.tensor([rank + offset])
    dist.all_reduce(total)
    return total


def _raise_on_one(rank, world_size):
    if rank == 1:
        raise ValueError("rank one does not like it")
    dist.barrier()


def _hang_on_one(rank, world_size):
    if rank == 0:
        time.sleep(1000)


def _die_on_one(rank, world_size):
    if rank == 1:
        os._exit(7)
    return "alive"


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_rank_returns_its_value(world_size):
    want = sum(range(world_size)) + 10 * world_size
    assert [int(value) for value in run_ranks(_sum, world_size, 10)] == [want] * world_size


def test_an_exception_is_raised_with_rank_and_traceback():
    with pytest.raises(RankError, match=r"(?s)rank 1 failed.*_raise_on_one.*does not like") as info:
        run_ranks(_raise_on_one, 2, timeout=20)
    assert isinstance(info.value.__cause__, ValueError)


def test_a_hanging_rank_is_named_with_its_stack():
    with pytest.raises(RankError, match=r"(?s)rank 0 hung in.*_hang_on_one") as info:
        run_ranks(_hang_on_one, 2, timeout=2)
    assert info.value.ranks == [0]


def test_a_dead_rank_is_an_error_unless_it_may_die():
    with pytest.raises(RankError, match=r"(?s)rank 1 failed.*exit code 7"):
        run_ranks(_die_on_one, 2)
    assert run_ranks(_die_on_one, 2, may_die=[1]) == ["alive", Died(7)]


@on_ranks(2)
def _tell_process(rank, folder):
    Path(folder, str(rank)).write_text(str(os.getpid()))


@on_ranks(2)
def _fail_on_one(rank):
    _raise_on_one(rank, 2)


def test_tests_of_ranks_share_processes_until_one_fails(tmp_path):
    def process_ids():
        _tell_process(folder=tmp_path)
        return [int(Path(tmp_path, str(rank)).read_text()) for rank in range(2)]

    processes = process_ids()
    assert process_ids() == processes
    with pytest.raises(RankError, match="does not like"):
        _fail_on_one()
    assert not set(process_ids()) & set(processes)


@on_ranks(2)
def _yields(rank):
    yield
    raise AssertionError


def _set_dtype():
    torch.set_default_dtype(torch.float64)


def _set_variable():
    os.environ["COMMHOOKS_KERNELS"] = "none"


def _patch():
    commhooks.hook.register = None


def _register():
    _registry._factories["left"] = None


@on_ranks(2)
def _leave(rank, change):
    if rank == 1:
        change()


def test_a_test_of_ranks_that_yields_fails():
    with pytest.raises(RankError, match=r"(?s)rank 0 failed.*asserts nothing"):
        _yields()


@pytest.mark.parametrize(
    ("change", "left"),
    [
        (_set_dtype, "default dtype"),
        (_set_variable, "environment"),
        (_patch, "commhooks.hook.register"),
        (_register, "schemes"),
    ],
)
def test_a_test_of_ranks_that_leaves_another_state_fails(change, left):
    with pytest.raises(RankError, match=f"(?s)rank 1 failed.*to the next test:.*{left}"):
        _leave(change=change)


def test_a_mark_that_would_be_lost_is_refused():
    with pytest.raises(AssertionError, match="below the marks"):

        @on_ranks(2)
        @pytest.mark.slow
        def test(rank):
            pass
