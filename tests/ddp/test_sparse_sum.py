"""Sparse gradients on backends that sum dense tensors only: the result is Gloo's, bit for bit."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import commhooks
import ddp_core
from ddp_core import AllReduce
from ddp_core.exchange import _collectives as sparse_sum
from tests.tools.harness import run_ranks
from tests.tools.training import equal_bits, flat


def as_on_nccl() -> Any:
    """Treats the backend as one that refuses sparse tensors."""
    return mock.patch.object(sparse_sum, "is_gloo", return_value=False)


def sparse(rank: int, entries: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    indices = torch.randint(0, 9, (1, entries), generator=generator)
    values = torch.randn(entries, 3, generator=generator)
    return torch.sparse_coo_tensor(indices, values, (9, 3), check_invariants=True)


def _sums(rank: int, world_size: int, per_rank: int) -> bool:
    group = dist.group.WORLD
    assert group is not None
    equal = []
    for op in ("mean", "sum"):
        mine = sparse(rank, per_rank * rank)
        expected, summed = mine.clone(), mine.clone()
        AllReduce(expected, op).issue(group).wait()
        with as_on_nccl():
            work = AllReduce(summed, op).issue(group)
            assert isinstance(work, sparse_sum.SparseSum)
            work.wait()
        assert summed.is_coalesced()
        equal.append(torch.equal(summed.to_dense(), expected.to_dense()))
    return all(equal)


@pytest.mark.parametrize("per_rank", [0, 5])
def test_the_sum_is_gloos(per_rank: int) -> None:
    assert run_ranks(_sums, 3, per_rank) == [True] * 3


def _maximum(rank: int, world_size: int) -> str:
    with as_on_nccl(), pytest.raises(ValueError, match="can be summed") as caught:
        AllReduce(sparse(rank, 2), "max").issue(dist.group.WORLD)
    return str(caught.value)


def test_a_maximum_is_refused() -> None:
    assert "'max'" in run_ranks(_maximum, 1)[0]


class Embedded(nn.Module):
    """Two sparse embeddings and a layer; one of them is used in even steps only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(20, 8, sparse=True)
        self.places = nn.Embedding(20, 8, sparse=True)
        self.out = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, places: bool) -> torch.Tensor:
        inside = self.words(x)
        return self.out(inside + self.places(x) if places else inside)


def _trained(rank: int, world_size: int, scheme: str | None, options: Any) -> bool:
    def train() -> torch.Tensor:
        model = ddp_core.DistributedDataParallel(Embedded(), bucket_cap_mb=1e-4, **options)
        if scheme is not None:
            commhooks.register(model, scheme)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            ids = torch.randint(0, 20, (4 + rank,), generator=torch.Generator().manual_seed(step))
            used = not options.get("find_unused_parameters") or step % 2 == 0
            optimizer.zero_grad()
            model((ids + rank) % 20, used).square().mean().backward()
            optimizer.step()
        return flat(model.parameters())

    expected = train()
    with as_on_nccl():
        return equal_bits([expected, train()])


@pytest.mark.parametrize("scheme", [None, "fp16", "topk"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"static_graph": True},
        {"find_unused_parameters": True},
        {"gradient_as_bucket_view": True},
    ],
    ids=["plain", "static", "unused", "view"],
)
def test_training_is_as_on_gloo(scheme: str | None, options: dict[str, Any]) -> None:
    assert run_ranks(_trained, 2, scheme, options) == [True, True]


def _shared_values(rank: int, world_size: int, scheme: str | None, torchs: bool) -> bool:
    """Whether two embeddings whose sum is used get the gradients of dense ones."""
    grads = []
    for is_sparse in (True, False):
        model = Embedded()
        model.words.sparse = model.places.sparse = is_sparse
        make = nn.parallel.DistributedDataParallel if torchs else ddp_core.DistributedDataParallel
        ddp = make(model)
        if scheme is not None:
            commhooks.register(ddp, scheme)
        ids = torch.randint(0, 20, (6,), generator=torch.Generator().manual_seed(rank))
        ddp(ids, True).square().mean().backward()
        grads.append(flat([model.words.weight.grad, model.places.weight.grad]))
    return torch.allclose(*grads)


@pytest.mark.parametrize(
    ("scheme", "torchs"), [(None, False), ("none", False), ("none", True)], ids=str
)
def test_gradients_that_share_their_values_are_averaged_once(
    scheme: str | None, torchs: bool
) -> None:
    assert run_ranks(_shared_values, 2, scheme, torchs) == [True, True]
