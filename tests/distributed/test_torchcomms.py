"""The backend for torchcomms, in a stand-in for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import commhooks
from commhooks.errors import RegistrationError
from commhooks.hosts import torchcomms
from tests.distributed.comms import AVG, MAX, SUM, Stand
from tests.distributed.harness import run_ranks


def _collectives(rank: int, world_size: int) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        stand = Stand(patch)
        torchcomms.register_backend("int8", least=100)
        comm = stand.new_comm("commhooks", "gradients")
    n = world_size
    x = torch.randn(n * 1000, generator=torch.Generator().manual_seed(rank))
    total = x.clone()
    dist.all_reduce(total)
    mine = total.chunk(n)[rank]

    def error(found: Tensor, exact: Tensor) -> float:
        return float((found - exact).norm() / exact.norm())

    found: dict[str, Any] = {
        "facts": (comm.get_rank(), comm.get_size()) == (rank, n),
        "names": (comm.get_backend_name(), comm.get_comm_name()) == ("commhooks", "gradients"),
    }
    for async_op in (False, True):
        ours, mean, part = x.clone(), x.clone(), torch.empty(1000)
        for work in (
            comm.all_reduce(ours, SUM, async_op),
            comm.all_reduce(mean, AVG, async_op),
            comm.reduce_scatter_single(part, x, SUM, async_op),
        ):
            assert (work is not None) == async_op
            if work is not None:
                work.wait()
        found[f"sum {async_op}"] = 0 < error(ours, total) < 0.02
        found[f"mean {async_op}"] = 0 < error(mean, total / n) < 0.02
        found[f"part {async_op}"] = 0 < error(part, mine) < 0.02
    found["ledger"] = comm.collectives.calls == 6

    small, most, whole = x[:99].clone(), x.clone(), (100 * x).long()
    comm.all_reduce(small, SUM, False)
    comm.all_reduce(most, MAX, False)
    comm.all_reduce(whole, SUM, False)
    wholes = (100 * x).long()
    dist.all_reduce(wholes)
    greatest = x.clone()
    dist.all_reduce(greatest, dist.ReduceOp.MAX)
    found["exact"] = torch.equal(most, greatest) and torch.equal(whole, wholes)
    found["small"] = error(small, total[:99]) < 1e-6

    gathered, listed = torch.empty(4 * n), [torch.empty(4) for _ in range(n)]
    own = torch.full((4,), float(rank))
    comm.all_gather_single(gathered, own, False)
    comm.all_gather(listed, own, False)
    found["gathered"] = torch.equal(gathered[::4], torch.arange(float(n)))
    found["listed"] = torch.equal(torch.cat(listed), gathered)
    into = torch.empty(n)
    comm.all_to_all_single(into, torch.full((n,), float(rank)), False)
    found["to all"] = torch.equal(into, torch.arange(float(n)))
    comm.all_to_all_v_single(into, torch.full((n,), float(rank)), [1] * n, [1] * n, False)
    found["to all, uneven"] = torch.equal(into, torch.arange(float(n)))
    comm.broadcast(own, n - 1, False)
    found["broadcast"] = float(own[0]) == n - 1
    summed = torch.ones(3)
    comm.reduce(summed, 1, SUM, False)
    found["reduced"] = rank != 1 or float(summed[0]) == n
    comm.scatter(
        own, [torch.full((4,), float(one)) for one in range(n)] if rank == 0 else [], 0, False
    )
    found["scattered"] = float(own[0]) == rank
    comm.gather(listed if rank == 1 else [], own + 1, 1, False)
    found["at the root"] = rank != 1 or float(torch.stack(listed).sum()) == 4 * n * (n + 1) / 2
    if rank == 0:
        works = [comm.send(torch.full((2,), float(one)), one, True) for one in range(1, n)]
        assert all(work.wait() for work in works)
    else:
        assert comm.recv(into[:2], 0, False) is None
        found["received"] = into[:2].tolist() == [rank, rank]
    comm.barrier(False)
    comm.finalize()
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_sums_are_by_the_scheme_and_all_else_as_it_is(ranks: int) -> None:
    for found in run_ranks(_collectives, ranks):
        assert all(found.values()), found


def _split(rank: int, world_size: int) -> list[Any]:
    """Twice the same ranks: a name in the store must not come again."""
    with pytest.MonkeyPatch.context() as patch:
        stand = Stand(patch)
        torchcomms.register_backend("int8", name="ours")
        comm = stand.new_comm("ours")
    sums: list[Any] = []
    for _ in range(2):
        part = comm.split([0, 2] if rank != 1 else [], "part", SimpleNamespace())
        if part is None:
            sums.append(None)
            continue
        tensor = torch.full((2000,), rank + 1.0)
        part.all_reduce(tensor, SUM, False)
        pair = part.split([1, 0], "turned", SimpleNamespace())
        sums.append((round(float(tensor.mean()), 1), part.get_rank(), pair.get_rank(), part.device))
        pair.finalize()
        part.finalize()
    comm.finalize()
    return sums


def test_a_communicator_is_split() -> None:
    cpu = torch.device("cpu")
    expected = [[(4.0, 0, 1, cpu)] * 2, [None, None], [(4.0, 1, 0, cpu)] * 2]
    assert run_ranks(_split, 3) == expected


def test_a_scheme_with_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    Stand(monkeypatch)
    with pytest.raises(RegistrationError, match=r"commhooks\.Collectives"):
        torchcomms.register_backend("topk")
    with pytest.raises(commhooks.errors.UnknownSchemeError):
        torchcomms.register_backend("int7")
