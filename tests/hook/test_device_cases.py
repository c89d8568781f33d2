"""The tests of tests/device on the CPU, so that they are not wrong by construction."""

from __future__ import annotations

import pytest
import torch

from tests.device.device_cases import BODIES, SCHEMES, trained
from tests.device.host_cases import HOSTS
from tests.device.test_cuda import check_that_backward_gives_the_schemes_average
from tests.device.two_ranks import of_ranks, simulated, tolerance
from tests.shelf import BUILT_IN
from tests.tools.harness import on_ranks, run_ranks


def bodies(rank: int, world_size: int) -> list[str]:
    for body in BODIES.values():
        body("cpu")
    return list(BODIES)


def hosts(rank: int, world_size: int) -> list[str]:
    for body in HOSTS.values():
        body("cpu")
    return list(HOSTS)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 1])
def test_every_body_runs_on_the_cpu(world_size: int) -> None:
    assert run_ranks(bodies, world_size, timeout=100) == [list(BODIES)] * world_size


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 1])
def test_every_host_runs_on_the_cpu(world_size: int) -> None:
    quiet = (".*FSDP", ".*NO_SHARD", ".*deprecated")  # of FSDP1
    names = run_ranks(hosts, world_size, timeout=100, ignore_warnings=quiet)
    assert names == [list(HOSTS)] * world_size


def backward_of_every_scheme(rank: int, world_size: int) -> int:
    for name in BUILT_IN:
        layers = [torch.nn.Linear(48, 48) for _ in range(4)]
        model = torch.nn.Sequential(*layers)
        check_that_backward_gives_the_schemes_average(name, model, bucket_cap_mb=0.01)
    return len(BUILT_IN)


def test_backward_gives_a_schemes_average_on_the_cpu() -> None:
    (count,) = run_ranks(backward_of_every_scheme, 1, timeout=100)
    assert count > 20


@on_ranks(2, timeout=100)
def test_both_classes_train_what_is_given() -> None:
    for name in SCHEMES:
        left, right = (trained("cpu", name, cls=cls) for cls in ("torch", "ours"))
        assert len(left) == len(right), name


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_get_what_a_simulation_gives(world_size: int) -> None:
    """As two NCCL ranks on a GPU are compared with it."""
    expected = simulated(world_size)
    for results in run_ranks(of_ranks, world_size, "gloo", "cpu", timeout=100):
        assert results.keys() == expected.keys()
        for name, values in results.items():
            for value, simulated_value in zip(values, expected[name], strict=True):
                near = tolerance(name)
                torch.testing.assert_close(value, simulated_value, rtol=near, atol=near, msg=name)
