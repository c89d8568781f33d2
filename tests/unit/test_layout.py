"""Bucket assignment: torch's, index by index; groups, splits and caps."""

from __future__ import annotations

import random
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp_core.reducer._parameters import Trained, trained_parameters
from ddp_core.reducer._plan import BucketCaps, arrange, assign_buckets

MiB = 1024 * 1024


def random_model(seed: int) -> list[torch.Tensor]:
    rng = random.Random(seed)
    dtypes = [torch.float32] * 3 + [torch.float64, torch.bfloat16]
    return [
        torch.empty(rng.choice([0, 1, 7, 100, 1000, 5000]), dtype=rng.choice(dtypes))
        for _ in range(rng.randint(1, 40))
    ]


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("arrival", [False, True])
def test_assignment_is_that_of_torch(seed, arrival):
    rng = random.Random(1000 + seed)
    tensors = random_model(seed)
    limits = rng.choice([[4000], [400, 4000], [100, 2000, 8000], [sys.maxsize], [0]])
    alone = [rng.random() < 0.1 for _ in tensors]
    order = rng.sample(range(len(tensors)), len(tensors)) if arrival else None
    taken = tensors if order is None else [tensors[index] for index in order]
    expected, _ = dist._compute_bucket_assignment_by_size(taken, limits, alone, order or [])
    got = assign_buckets(
        [tensor.numel() * tensor.element_size() for tensor in tensors],
        [(tensor.dtype, tensor.device) for tensor in tensors],
        limits,
        alone=alone,
        order=order,
    )
    assert sorted(got) == sorted(expected)
    if order is None:
        assert got == expected


def parameters(*sizes: int, sparse: tuple[int, ...] = ()) -> list[Trained]:
    return [
        Trained(f"p{number}", nn.Parameter(torch.empty(size)), number in sparse)
        for number, size in enumerate(sizes)
    ]


def test_first_step_takes_reverse_registration_order():
    assert arrange(parameters(10, 10, 10), [40]) == [[2], [1], [0]]
    assert arrange(parameters(10, 10, 10), [sys.maxsize]) == [[0, 1, 2]]


def test_arrival_order_gives_a_small_first_bucket():
    assert arrange(parameters(10, 10, 10), [40, 80], order=[1, 2, 0]) == [[1], [2, 0]]


def test_groups_share_no_bucket_and_launch_when_complete():
    buckets = arrange(
        parameters(10, 1, 10, 1, 10),
        [80],
        order=[4, 3, 2, 1, 0],
        group_of=lambda _, parameter: parameter.numel() > 1,
    )
    assert buckets == [[4, 2], [3, 1], [0]]


def test_splits_are_buckets_whatever_their_size_and_the_rest_is_as_usual():
    buckets = arrange(
        parameters(10, 10, 10, 10, 10), [40], order=[4, 3, 2, 1, 0], splits=[[4, 3], [1]]
    )
    assert buckets == [[4, 3], [2], [1], [0]]


def test_sparse_parameters_are_alone():
    assert arrange(parameters(1, 1, 1, sparse=(1,)), [99], order=[0, 1, 2]) == [[1], [0, 2]]


def test_caps_are_those_of_the_constructor_arguments():
    assert BucketCaps.of(None, None, "cuda").limits == (MiB, 25 * MiB)
    assert BucketCaps.of(None, None, "cpu").limits == (MiB, 8 * MiB)
    assert BucketCaps.of(3, None, "cpu").limits == (3 * MiB,)
    assert BucketCaps.of(3, [1, 2], "cpu").limits == (MiB, 2 * MiB)
    assert BucketCaps.of(3, None, "cpu").initial(rebuilds=True) == (sys.maxsize,)
    assert BucketCaps.of(3, [1, 2], "cpu").initial(rebuilds=True) == (MiB, 2 * MiB)
    assert BucketCaps.of(3, None, "cpu").initial(rebuilds=False) == (3 * MiB,)
    assert BucketCaps.of(None, None, "cpu").for_hook(25).limits == (MiB, 25 * MiB)
    assert BucketCaps.of(None, None, "cpu").for_hook(None).limits == (MiB, 8 * MiB)
    assert BucketCaps.of(3, None, "cpu").for_hook(25).limits == (3 * MiB,)


def test_shared_and_ignored_parameters_are_taken_once_or_not_at_all():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Embedding(3, 2, sparse=True))
    model[1].weight = model[0].weight
    model[1].bias.requires_grad_(False)
    names = [
        (parameter.name, parameter.sparse) for parameter in trained_parameters(model, {"0.bias"})
    ]
    assert names == [("0.weight", False), ("2.weight", True)]
