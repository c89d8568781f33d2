"""States that an earlier release saved load, and training goes on bit for bit."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.harness import run_ranks
from tests.distributed.old_states import FILE, SCHEMES, go_on


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_state_of_format_2_goes_on_bit_for_bit(scheme: str) -> None:
    expected = torch.load(FILE)[scheme]["averages"]
    for average, old in zip(run_ranks(go_on, 2, scheme), expected, strict=True):
        assert torch.equal(average, old)
