"""Buckets of the reducer: torch's assignment, index by index, and torch's six methods."""

from __future__ import annotations

import random
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp_core import GradBucket
from ddp_core.reducer._buckets import FlatBucket
from ddp_core.reducer._parameters import Trained, trained_parameters
from ddp_core.reducer._plan import BucketCaps, arrange, assign_buckets
from ddp_core.reducer._step_exchange import StepExchange

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
    actual = assign_buckets(
        [tensor.numel() * tensor.element_size() for tensor in tensors],
        [(tensor.dtype, tensor.device) for tensor in tensors],
        limits,
        alone=alone,
        order=order,
    )
    assert sorted(actual) == sorted(expected)
    if order is None:
        assert actual == expected


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


PARAMETERS = [
    nn.Parameter(torch.zeros(2, 3)),
    nn.Parameter(torch.zeros(())),
    nn.Parameter(torch.zeros(4)),
]


def bucket(**options: object) -> GradBucket:
    return GradBucket(3, torch.arange(11.0), PARAMETERS, names=["a", "b", "c"], **options)


def test_it_has_torchs_methods() -> None:
    for method in ("index", "buffer", "gradients", "parameters", "is_last", "set_buffer"):
        assert callable(getattr(torch.distributed.GradBucket, method))
        assert callable(getattr(GradBucket, method))


def test_a_bucket_has_what_it_was_given() -> None:
    given = bucket(is_last=False)
    assert (given.index(), given.is_last(), given.names()) == (3, False, ["a", "b", "c"])
    assert all(left is right for left, right in zip(given.parameters(), PARAMETERS, strict=True))
    assert bucket().is_last()


def test_gradients_are_views_in_the_parameters_shapes() -> None:
    given = bucket()
    assert [tuple(gradient.shape) for gradient in given.gradients()] == [(2, 3), (), (4,)]
    given.gradients()[1].fill_(-1.0)
    assert given.buffer()[6] == -1.0


def test_changing_the_lists_it_returns_changes_nothing() -> None:
    given = bucket()
    given.parameters().clear()
    given.names().clear()
    assert len(given.parameters()) == len(given.names()) == 3


def test_a_new_buffer_has_as_many_entries() -> None:
    given, new = bucket(), torch.ones(11)
    given.set_buffer(new)
    assert given.buffer() is new
    assert given.gradients()[0].tolist() == [[1.0] * 3] * 2
    with pytest.raises(ValueError, match="11 entries, got 5"):
        given.set_buffer(torch.ones(5))


@pytest.mark.parametrize("shape", [(10,), (12,), (1, 11)])
def test_a_buffer_that_does_not_fit_the_parameters_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="flat"):
        GradBucket(0, torch.zeros(shape), PARAMETERS)


@pytest.mark.parametrize("replaced", [0, 1])
def test_a_bucket_of_views_and_copies_is_divided_once(replaced: int) -> None:
    parameters = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))]
    trained = [
        Trained(str(index), parameter, sparse=False) for index, parameter in enumerate(parameters)
    ]
    flat = FlatBucket([0, 1], trained, as_view=True)
    for slot, parameter in enumerate(parameters):
        parameter.grad = torch.full_like(parameter, 6.0)
        if slot != replaced:
            flat.views[slot].fill_(6.0)
            parameter.grad = flat.views[slot]
    flat.fill([parameter.grad for parameter in parameters], 2.0)
    assert flat.buffer.tolist() == [3.0] * 5


@pytest.mark.parametrize(
    ("needed", "last"),
    [(None, [2]), ([True] * 3, [2]), ([True, True, False], [1]), ([True, False, True], [2])],
)
def test_the_last_bucket_that_is_sent_is_marked(needed: list[bool] | None, last: list[int]) -> None:
    sent: list[tuple[int, bool]] = []

    def launch(bucket: Any, *, is_last: bool, times: object) -> None:
        sent.append((bucket.number, is_last))

    buckets = [SimpleNamespace(number=number, buffer=torch.zeros(1)) for number in range(3)]
    exchange: Any = SimpleNamespace(
        step=SimpleNamespace(needed_buckets=needed),
        buckets=buckets,
        launcher=SimpleNamespace(launch=launch),
        times_of=lambda bucket: None,
    )
    for sent_bucket in buckets:
        StepExchange.send(exchange, sent_bucket)  # type: ignore[arg-type]
    assert [number for number, is_last in sent if is_last] == last


def test_no_parameters_make_an_empty_bucket() -> None:
    assert GradBucket(0, torch.zeros(0), []).gradients() == []
