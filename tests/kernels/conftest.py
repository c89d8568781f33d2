"""Begins the emulator's orders of lanes anew in every test."""

from __future__ import annotations

from itertools import cycle

import pytest

from tests.kernels.machines import ORDERS, TURNS


@pytest.fixture(autouse=True)
def _first_order() -> None:
    TURNS["orders"] = cycle(ORDERS)
