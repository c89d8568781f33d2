"""Several ranks on one GPU: two by NCCL, two and four by Gloo; skipped where there is no GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing import assert_close

from tests.device.device_cases import BODIES
from tests.device.host_cases import HOSTS
from tests.device.two_ranks import (
    all_reduced,
    bodies_of_ranks,
    means_of_ranks,
    simulated,
    tolerance,
)
from tests.tools.harness import run_ranks

pytestmark = [
    pytest.mark.device,
    pytest.mark.distributed,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def run(worker: Any, world_size: int, backend: str, *args: Any) -> list[Any]:
    # NCCL's and torch's warnings about groups are not what is tested here.
    options: dict[str, Any] = {"timeout": 110, "pg_timeout": 60, "ignore_warnings": ("",)}
    return run_ranks(worker, world_size, backend, "cuda", *args, **options)


def test_nccl_connects_two_ranks_on_one_gpu() -> None:
    assert run(all_reduced, 2, "nccl") == [[3.0] * 3] * 2


def check_schemes(world_size: int, backend: str) -> None:
    expected = simulated(world_size)
    for results in run(means_of_ranks, world_size, backend):
        for name, values in results.items():
            for value, other in zip(values, expected[name], strict=True):
                near = tolerance(name, world_size)
                assert_close(value, other, rtol=near, atol=near, msg=name)


def test_schemes_give_by_nccl_what_a_simulation_gives() -> None:
    check_schemes(2, "nccl")


def test_hooks_run_by_nccl() -> None:
    assert run(bodies_of_ranks, 2, "nccl", list(BODIES)) == [list(BODIES)] * 2


@pytest.mark.parametrize("name", HOSTS)  # one by one: a host that hangs takes no other along
def test_hosts_run_by_nccl(name: str) -> None:
    assert run(bodies_of_ranks, 2, "nccl", [name]) == [[name]] * 2


@pytest.mark.parametrize("world_size", [2, 4])
def test_schemes_give_by_gloo_what_a_simulation_gives(world_size: int) -> None:
    check_schemes(world_size, "gloo")


def test_hooks_run_by_gloo() -> None:
    assert run(bodies_of_ranks, 2, "gloo", list(BODIES)) == [list(BODIES)] * 2
