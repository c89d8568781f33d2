"""GradBucket: torch's six methods over one flat tensor."""

import pytest
import torch
from torch import nn

from ddp_core import GradBucket

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


def test_no_parameters_make_an_empty_bucket() -> None:
    assert GradBucket(0, torch.zeros(0), []).gradients() == []
