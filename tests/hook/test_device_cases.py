"""The tests of tests/device on the CPU, so that they are not wrong by construction."""

from __future__ import annotations

import pytest
import torch

from tests.device.device_cases import BODIES, SCHEMES, trained
from tests.device.host_cases import HOSTS
from tests.device.test_cuda import check_that_backward_gives_the_schemes_average
from tests.device.two_ranks import means_of_ranks, simulated, tolerance
from tests.shelf import BUILT_IN
from tests.tools.harness import on_ranks, run_ranks


@pytest.mark.slow
@pytest.mark.parametrize("body", BODIES)
@on_ranks(1, 2, timeout=100)
def test_every_body_runs_on_the_cpu(body: str) -> None:
    BODIES[body]("cpu")


@pytest.mark.slow
@pytest.mark.parametrize("host", HOSTS)
@on_ranks(1, 2, timeout=100, ignore_warnings=(".*FSDP", ".*NO_SHARD", ".*deprecated"))
def test_every_host_runs_on_the_cpu(host: str) -> None:
    HOSTS[host]("cpu")


@on_ranks(1, timeout=100)
def test_backward_gives_a_schemes_average_on_the_cpu() -> None:
    assert len(BUILT_IN) > 20
    for name in BUILT_IN:
        layers = [torch.nn.Linear(48, 48) for _ in range(4)]
        model = torch.nn.Sequential(*layers)
        check_that_backward_gives_the_schemes_average(name, model, bucket_cap_mb=0.01)


@on_ranks(2, timeout=100)
def test_both_classes_train_what_is_given() -> None:
    for name in SCHEMES:
        left, right = (trained("cpu", name, cls=cls) for cls in ("torch", "ours"))
        assert len(left) == len(right), name


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_get_what_a_simulation_gives(world_size: int) -> None:
    """As two NCCL ranks on a GPU are compared with it."""
    expected = simulated(world_size)
    for results in run_ranks(means_of_ranks, world_size, "gloo", "cpu", timeout=100):
        assert results.keys() == expected.keys()
        for name, values in results.items():
            for value, simulated_value in zip(values, expected[name], strict=True):
                near = tolerance(name, world_size)
                torch.testing.assert_close(value, simulated_value, rtol=near, atol=near, msg=name)
