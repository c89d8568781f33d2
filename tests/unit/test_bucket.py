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
    one = bucket(is_last=False)
    assert (one.index(), one.is_last(), one.names()) == (3, False, ["a", "b", "c"])
    assert all(left is right for left, right in zip(one.parameters(), PARAMETERS, strict=True))
    assert bucket().is_last()


def test_gradients_are_views_in_the_parameters_shapes() -> None:
    one = bucket()
    assert [tuple(gradient.shape) for gradient in one.gradients()] == [(2, 3), (), (4,)]
    one.gradients()[1].fill_(-1.0)
    assert one.buffer()[6] == -1.0


def test_changing_the_lists_it_returns_changes_nothing() -> None:
    one = bucket()
    one.parameters().clear()
    one.names().clear()
    assert len(one.parameters()) == len(one.names()) == 3


def test_a_new_buffer_has_as_many_entries() -> None:
    one, new = bucket(), torch.ones(11)
    one.set_buffer(new)
    assert one.buffer() is new
    assert one.gradients()[0].tolist() == [[1.0] * 3] * 2
    with pytest.raises(ValueError, match="11 entries, got 5"):
        one.set_buffer(torch.ones(5))


@pytest.mark.parametrize("shape", [(10,), (12,), (1, 11)])
def test_a_buffer_that_does_not_fit_the_parameters_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="flat"):
        GradBucket(0, torch.zeros(shape), PARAMETERS)


@pytest.mark.parametrize("replaced", [0, 1])
def test_a_bucket_of_views_and_copies_is_divided_once(replaced: int) -> None:
    parameters = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))]
    trained = [Trained(str(index), one, sparse=False) for index, one in enumerate(parameters)]
    flat = FlatBucket([0, 1], trained, as_view=True)
    for slot, one in enumerate(parameters):
        one.grad = torch.full_like(one, 6.0)
        if slot != replaced:
            flat.views[slot].fill_(6.0)
            one.grad = flat.views[slot]
    flat.fill([one.grad for one in parameters], 2.0)
    assert flat.buffer.tolist() == [3.0] * 5


@pytest.mark.parametrize(
    ("needed", "last"),
    [(None, [2]), ([True] * 3, [2]), ([True, True, False], [1]), ([True, False, True], [2])],
)
def test_the_last_bucket_that_is_sent_is_told_so(
    needed: list[bool] | None, last: list[int]
) -> None:
    sent: list[tuple[int, bool]] = []

    def launch(one: Any, *, is_last: bool, times: object) -> None:
        sent.append((one.number, is_last))

    buckets = [SimpleNamespace(number=number, buffer=torch.zeros(1)) for number in range(3)]
    exchange: Any = SimpleNamespace(
        step=SimpleNamespace(needed_buckets=needed),
        buckets=buckets,
        launcher=SimpleNamespace(launch=launch),
        times_of=lambda one: None,
    )
    for one in buckets:
        StepExchange.send(exchange, one)  # type: ignore[arg-type]
    assert [number for number, is_last in sent if is_last] == last


def test_no_parameters_make_an_empty_bucket() -> None:
    assert GradBucket(0, torch.zeros(0), []).gradients() == []
