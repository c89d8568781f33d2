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
from tests.tools.harness import on_ranks
from tests.tools.training import flat


def as_on_nccl() -> Any:
    """Treats the backend as one that refuses sparse tensors."""
    return mock.patch.object(sparse_sum, "is_gloo", return_value=False)


def sparse(rank: int, entries: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    indices = torch.randint(0, 9, (1, entries), generator=generator)
    values = torch.randn(entries, 3, generator=generator)
    return torch.sparse_coo_tensor(indices, values, (9, 3), check_invariants=True)


@pytest.mark.parametrize("per_rank", [0, 5])
@on_ranks(3)
def test_the_sum_is_gloos(rank: int, per_rank: int) -> None:
    group = dist.group.WORLD
    assert group is not None
    for op in ("mean", "sum"):
        values = sparse(rank, per_rank * rank)
        expected, summed = values.clone(), values.clone()
        AllReduce(expected, op).issue(group).wait()
        with as_on_nccl():
            work = AllReduce(summed, op).issue(group)
            assert isinstance(work, sparse_sum.SparseSum)
            work.wait()
        assert summed.is_coalesced()
        assert torch.equal(summed.to_dense(), expected.to_dense())


@on_ranks(1)
def test_a_maximum_is_refused(rank: int) -> None:
    with (
        as_on_nccl(),
        pytest.raises(ValueError, match=r"'max'.*can be summed"),
    ):
        AllReduce(sparse(rank, 2), "max").issue(dist.group.WORLD)


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
@on_ranks(2)
def test_training_is_as_on_gloo(rank: int, scheme: str | None, options: dict[str, Any]) -> None:
    def train_embeddings() -> torch.Tensor:
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

    expected = train_embeddings()
    with as_on_nccl():
        assert torch.equal(expected, train_embeddings())


@on_ranks(2)
def test_gradients_that_share_their_values_are_averaged_once(rank: int) -> None:
    for scheme, wrap in (
        (None, ddp_core.DistributedDataParallel),
        ("none", ddp_core.DistributedDataParallel),
        ("none", nn.parallel.DistributedDataParallel),
    ):
        grads = []
        for is_sparse in (True, False):
            model = Embedded()
            model.words.sparse = model.places.sparse = is_sparse
            ddp = wrap(model)
            if scheme is not None:
                commhooks.register(ddp, scheme)
            ids = torch.randint(0, 20, (6,), generator=torch.Generator().manual_seed(rank))
            ddp(ids, True).square().mean().backward()
            grads.append(flat([model.words.weight.grad, model.places.weight.grad]))
        assert torch.allclose(*grads)
