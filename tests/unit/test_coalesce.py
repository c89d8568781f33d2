"""Held buckets, exchanged in other groups than they came in."""

import pytest
import torch
from torch import Tensor

from commhooks.core._layout import Layout
from commhooks.hook._coalesce import Coalescer, FindLayout
from ddp_core import Exchange

SIZES = {"a": 1, "b": 2, "c": 5}


def layout_of(names: list[str], dtype: torch.dtype) -> Layout:
    """As ``Parameters`` describes them: a complex parameter has pairs of reals."""
    pair = (2,) if dtype.is_complex else ()
    return Layout(names, [(SIZES[name], *pair) for name in names])


def doubled(flat: Tensor, find_layout: FindLayout) -> Exchange:
    yield from ()
    return flat * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_parameters_are_exchanged_in_other_buckets_and_come_back(dtype: torch.dtype) -> None:
    coalescer, buffers = Coalescer(), [torch.arange(3).to(dtype), torch.arange(3, 8).to(dtype)]
    for index, names in enumerate([["a", "b"], ["c"]]):
        layout = layout_of(names, dtype)
        coalescer.hold(index, buffers[index], lambda layout=layout: layout)
    groups = coalescer.groups_like([("b", "c"), ("a",)], merged=False)
    assert groups is not None
    seen = []
    for group in groups:
        with pytest.raises(StopIteration) as end:
            next(group.exchange(doubled))
        seen.append((end.value.value.real / 2).tolist())
    assert seen == [[1, 2, 3, 4, 5, 6, 7], [0]]
    assert torch.cat(buffers).real.tolist() == [0, 2, 4, 6, 8, 10, 12, 14]
