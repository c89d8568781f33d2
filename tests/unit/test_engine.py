"""Gradients that schemes do not see: sparse and complex ones."""

from __future__ import annotations

import pytest
import torch

from commhooks import Schedule, Scheme
from commhooks.core import Layout
from commhooks.hook.engine import Engine
from commhooks.schemes import Dense, Noop
from commhooks.wrappers import PeriodicDense
from ddp_core import simulate

LAYOUT = Layout(["a"], [(4, 1)])


@pytest.mark.parametrize(
    ("scheme", "averaged"),
    [
        (Noop(), False),
        (Dense(), True),
        (Schedule([(0, Dense()), (100, Noop())]), True),
        (PeriodicDense(Noop(), every=2), True),
    ],
    ids=["noop", "dense", "schedule", "periodic"],
)
@pytest.mark.parametrize("sparse", [True, False], ids=["sparse", "complex"])
def test_they_stay_local_only_under_a_scheme_without_exchanges(
    scheme: Scheme, averaged: bool, sparse: bool
) -> None:
    exchanges = []
    for rank in range(2):
        engine = Engine(scheme, rank=rank, world_size=2)
        engine.begin_bucket(0, is_last=True)
        if sparse:
            grad = torch.sparse_coo_tensor([[0]], [[float(rank)]], (4, 1), check_invariants=True)
        else:
            grad = torch.full((4,), float(rank), dtype=torch.complex64)
        exchanges.append(engine.exchange(grad, LAYOUT))
    means = [float((mean.to_dense() if sparse else mean.real)[0]) for mean in simulate(exchanges)]
    assert means == ([0.5, 0.5] if averaged else [0.0, 1.0])
