"""GradBucket: torch's six methods over one flat tensor."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ddp_core import GradBucket
from ddp_core.reducer._buckets import FlatBucket
from ddp_core.reducer._parameters import Trained
from ddp_core.reducer._step_exchange import StepExchange

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


def test_it_tells_what_it_was_given() -> None:
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
def test_the_last_bucket_that_is_sent_is_told_so(
    needed: list[bool] | None, last: list[int]
) -> None:
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
