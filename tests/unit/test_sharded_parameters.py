"""Values kept by piece are saved by parameter, and load on another number of ranks."""

from __future__ import annotations

import pytest
import torch

from commhooks.core._names import padding_name
from commhooks.hook._parameters import Parameter
from commhooks.hook._sharded import FlatParameters, ShardedParameter, ShardedParameters


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize("before", [1, 2, 3, 4, 7])
def test_padding_stays_with_as_many_ranks_and_is_left_out_on_others(
    before: int, ranks: int
) -> None:
    parameter = ShardedParameter("weight", torch.Size([5, 2]), torch.float32, 0, True)
    saving, loading = (ShardedParameters([parameter], number) for number in (before, ranks))
    size = -(-5 // before)
    whole = torch.arange(1.0, 2 * size * before + 1).view(-1, 2)
    names = ["weight"] if before == 1 else [f"weight#{rank}" for rank in range(before)]
    saved = saving.to_checkpoint_layout(dict(zip(names, whole.split(size), strict=True)))
    kept = torch.cat(list(loading.to_bucket_layout(saved).values()))
    assert torch.equal(kept[:5], whole[:5])
    if before == ranks:
        assert torch.equal(kept, whole)
    elif len(kept) != len(whole):
        assert not kept[5:].any()


@pytest.mark.parametrize("ranks", [2, 3])
def test_padding_of_a_unit_stays_with_as_many_ranks_only(ranks: int) -> None:
    def unit(padding: int) -> FlatParameters:
        pieces = [("bias", 5), (padding_name("end"), padding)]
        return FlatParameters(
            [[(Parameter(name, torch.Size([n]), torch.float32, (0,)), True) for name, n in pieces]]
        )

    saved = unit(1).to_checkpoint_layout(
        {"bias": torch.ones(5), padding_name("end"): torch.ones(1)}
    )
    kept = unit(-5 % ranks).to_bucket_layout(saved)
    assert torch.equal(kept["bias"], torch.ones(5))
    assert torch.equal(kept[padding_name("end")], torch.ones(1))  # of 2 and 3 ranks alike
    assert torch.equal(unit(3).to_bucket_layout(saved)[padding_name("end")], torch.zeros(3))
