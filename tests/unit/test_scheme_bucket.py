"""What a scheme is given: gradient and residual, together or apart."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from commhooks import Bucket, ErrorFeedback, Layout, Result, Scheme, SchemeError, Simulation
from commhooks._bucket import SchemeExchange
from ddp_core import AllReduce

LAYOUT = Layout(["p"], [(6,)])


def bucket(**options: Tensor) -> Bucket:
    return Bucket(torch.arange(6.0), LAYOUT, **options)


def kept() -> dict[str, Tensor]:
    return {"residual": torch.full((6,), 0.5), "unsent": torch.empty(6)}


def test_the_gradient_is_the_raw_one_where_nothing_is_kept():
    one = bucket()
    assert one.gradient is one.raw is one.output


def test_the_gradient_has_the_residual_and_lies_where_the_rest_goes():
    one = bucket(**kept())
    assert torch.equal(one.gradient, one.raw + 0.5)
    assert one.gradient.data_ptr() == one.unsent.data_ptr()
    one.gradient.zero_()
    assert not one.gradient.any()  # it is formed once


def test_another_residual_makes_another_gradient():
    one = bucket(**kept())
    assert torch.equal(one.gradient, one.raw + 0.5)
    assert torch.equal(one.replace(residual=None).gradient, one.raw)


def test_a_layout_is_asked_for_when_it_is_read():
    asked = []

    def layout() -> Layout:
        asked.append(1)
        return LAYOUT

    one = Bucket(torch.zeros(6), layout)
    assert not asked
    assert one.layout is one.layout is LAYOUT
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("result", "unsent"),
    [
        (lambda one: Result(one.output), 0.0),
        (lambda one: Result(one.output, sent=one.gradient * 0.75), 0.25),
        (lambda one: Result(one.output, unsent=one.gradient * 0.5), 0.5),
    ],
)
def test_a_completed_result_says_what_was_not_sent(result, unsent):
    one = bucket(**kept())
    expected = (one.raw + 0.5) * unsent
    assert one.gradient is not None
    assert torch.equal(one.completed(result(one)).unsent, expected)


def test_a_mean_that_lies_in_the_residuals_place_is_moved():
    one = bucket(**kept())
    result = one.completed(Result(one.gradient.mul_(2.0)))
    assert torch.equal(result.mean, 2 * (one.raw + 0.5))
    assert not result.unsent.any()


def test_a_float64_bucket_is_rounded_for_kernels_and_feedback_gets_the_rest():
    raw = torch.tensor([1.0, 1e-9, 3.0, 0.1, 0.2, 0.3], dtype=torch.float64)
    one = Bucket(raw.clone(), LAYOUT, unsent=torch.empty_like(raw), output=torch.empty_like(raw))
    inside = one.in_float32()
    assert inside.raw.dtype == inside.output.dtype == inside.unsent.dtype == torch.float32
    inside.unsent.fill_(0.25)
    inside.output.copy_(inside.raw)
    result = one.result_of(inside)
    assert result.mean.dtype == torch.float64
    assert torch.equal(result.unsent, raw - raw.float() + 0.25)


def test_a_bucket_that_kernels_take_is_handed_on_as_it_is():
    one = bucket(**kept())
    assert one.in_float32() is one


@dataclass(frozen=True)
class Overlooks(Scheme):
    """Reads the gradient without what was kept."""

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        mean = yield AllReduce(bucket.raw.clone())
        return Result(mean)


def test_a_scheme_that_overlooks_the_residual_is_told():
    ranks = Simulation(ErrorFeedback(Overlooks()), {"p": (6,)}, world_size=2)
    with pytest.raises(SchemeError, match=r"Read bucket\.gradient, which is the sum"):
        ranks.step([torch.ones(6), torch.ones(6)])
