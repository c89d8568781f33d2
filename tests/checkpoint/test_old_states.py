"""States that an earlier release saved load, and training goes on: bit for bit, if it still can."""

from __future__ import annotations

import pytest
import torch

from tests.checkpoint.old_states import FILE, SCHEMES, go_on
from tests.tools.harness import on_ranks

# Random bits are keyed in another way since then, and the mean magnitude of a long block is summed
# in parts (docs/design/kernels.md): the share of the average by which that may change it. A draw of
# ternary values changes it by about its whole length. Blocks begin at parameters since then.
CHANGED = {"int8": 0.02, "sdp4bit": 0.3, "terngrad": 2.0, "onebit": 0.3, "onebit_adam": 0.3}
# Processors of another kind sum the products of matrices in another order.
CHANGED |= dict.fromkeys(("powersgd", "batched_powersgd", "acpsgd"), 0.0001)
CHANGED["dgc"] = 1e-6  # the product with a momentum is rounded before the sum since then


@pytest.mark.parametrize("scheme", SCHEMES)
@on_ranks(2)
def test_a_state_of_format_2_goes_on(rank: int, world_size: int, scheme: str) -> None:
    average, old = go_on(rank, world_size, scheme), torch.load(FILE)[scheme]["averages"][rank]
    if scheme in CHANGED:
        assert (average - old).norm() < CHANGED[scheme] * old.norm()
    else:
        assert torch.equal(average, old)
