"""The ledger's wire bytes against what a network interface counted between two hosts."""

from __future__ import annotations

from typing import Any

import pytest

from experiments.tools.namespaces import reason_not_to_run
from experiments.wire_bytes.__main__ import measure

pytestmark = pytest.mark.netns


@pytest.fixture(scope="module", autouse=True)
def _network_namespaces() -> None:
    reason = reason_not_to_run()
    if reason is not None:
        pytest.skip(reason)


@pytest.mark.parametrize(
    ("scheme", "options"),
    [
        pytest.param("none", {}, marks=pytest.mark.slow),  # all-reduces, of which PowerSGD has two
        pytest.param("fp16", {}, marks=pytest.mark.slow),
        pytest.param("bf16", {"fp32_sum": True}, marks=pytest.mark.slow),
        ("powersgd", {"rank": 4}),
    ],
    ids=["allreduce", "fp16", "bf16 with fp32 sum", "PowerSGD 4"],
)
@pytest.mark.slow
def test_an_interface_sends_what_the_ledger_says(scheme: str, options: dict[str, Any]) -> None:
    ranks = measure(scheme, options, steps=6)
    # Frame, IP and TCP headers are 66 bytes in 1500 or more; acknowledgements are the rest.
    assert ranks["ratio"].between(0.99, 1.05).all(), ranks.to_string()
