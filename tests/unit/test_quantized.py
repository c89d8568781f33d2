"""Blockwise schemes: their errors are those of theory, their bytes those of the formula."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import commhooks
from commhooks import ErrorFeedback, Scheme, Simulation
from commhooks.core import Bucket, Layout
from commhooks.research.baselines import QSGD, TernGrad
from commhooks.schemes import Blockwise, RandomK, TopK, TwoPhaseCast

D = 2**20


def gauss(generator: torch.Generator, n: int = D) -> Tensor:
    return torch.randn(n, generator=generator)


def laplace(generator: torch.Generator, n: int = D) -> Tensor:
    u = torch.rand(n, generator=generator, dtype=torch.float64) - 0.5
    return (-u.sign() * torch.log1p(-2 * u.abs())).float()


def student(generator: torch.Generator, n: int = D) -> Tensor:
    squares = torch.randn(3, n, generator=generator).square().sum(0)
    return torch.randn(n, generator=generator) / (squares / 3).sqrt()


def error_of(mean: Tensor, exact: Tensor) -> float:
    return float((mean.double() - exact.double()).square().sum() / exact.double().square().sum())


def single_shot(scheme: Scheme, x: Tensor) -> float:
    """The error of one rounding on one rank."""
    mean = Simulation(scheme, {"p": tuple(x.shape)}, world_size=1).step([x])[0]
    return error_of(mean, x)


# E|Q(x) - x|^2 / |x|^2: Gauss, Laplace, t(3), whose tail has no fourth moment.
TABLE: dict[str, tuple[Any, tuple[float, float, float]]] = {
    "fp16": (TwoPhaseCast(torch.float16), (4.3e-8, 4.3e-8, 4.3e-8)),
    "bf16": (TwoPhaseCast(torch.bfloat16), (2.8e-6, 2.8e-6, 2.8e-6)),
    "int8": (Blockwise("int8", 256), (4.9e-5, 1.0e-4, 3.3e-4)),
    "int8 stochastic": (Blockwise("int8", 256, "stochastic"), (9.7e-5, 2.0e-4, 6.9e-4)),
    "int8 dithered": (Blockwise("int8", 256, "dither"), (4.9e-5, 1.0e-4, 3.5e-4)),
    "fp8, MX": (Blockwise("mx_e4m3", 32), (8.6e-4, 1.0e-3, 1.1e-3)),
    "int4": (Blockwise("int4", 128), (0.0138, 0.026, 0.048)),
    "int4 stochastic": (Blockwise("int4", 128, "stochastic"), (0.0275, 0.052, 0.109)),
    "sign": (Blockwise("sign", 2048), (0.363, 0.50, 0.61)),
    "QSGD 64": (QSGD(64, 512), (0.021, 0.021, 0.021)),
    "QSGD 7": (QSGD(7, 512), (1.59, 1.33, 1.2)),
    "TernGrad": (TernGrad(512), (1.61, 2.4, 4.2)),
    "top-k 10 %": (TopK(0.1), (0.561, 0.404, 0.283)),
    "top-k 1 %": (TopK(0.01), (0.915, 0.838, 0.621)),
    "random-k 1 %": (RandomK(0.01), (0.99, 0.99, 0.99)),
}
DRAWS: tuple[Callable[[torch.Generator], Tensor], ...] = (gauss, laplace, student)


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.parametrize("column", range(3), ids=["gauss", "laplace", "t3"])
def test_single_shot_errors_are_those_of_the_table(name: str, column: int) -> None:
    scheme, expected = TABLE[name]
    if any(setting.name == "pattern" for setting in fields(scheme)):
        scheme = replace(scheme, pattern="all_gather")
    generator = torch.Generator().manual_seed(column)
    measured = single_shot(scheme, DRAWS[column](generator))
    # A sum of squares of t(3) is ruled by its few largest entries: samples differ by a fifth.
    near = 0.05 if column < 2 else 0.15
    assert math.isclose(measured, expected[column], rel_tol=near)


def test_a_rotation_makes_any_tail_a_normal_one() -> None:
    for draw in DRAWS:
        x = draw(torch.Generator().manual_seed(3))
        codec = Blockwise("int4", 128, rotate=True, pattern="all_gather")
        assert math.isclose(single_shot(codec, x), 0.0138, rel_tol=0.06 if draw != student else 0.2)


@pytest.mark.parametrize("world_size", [4, 8, 32])
@pytest.mark.parametrize("shared", [0.0, 0.5])
def test_two_phases_cost_what_their_law_says(world_size: int, shared: float) -> None:
    """omega (kappa + 1), kappa = sum |x_i|^2 / |sum x_i|^2; no matter how many ranks."""
    n = 2**17
    generator = torch.Generator().manual_seed(0)
    common = gauss(generator, n) * shared**0.5
    grads = [common + gauss(generator, n) * (1 - shared) ** 0.5 for _ in range(world_size)]
    exact = torch.stack(grads).double().mean(0)
    kappa = sum(float(g.double().square().sum()) for g in grads)
    kappa /= float((exact * world_size).square().sum())
    int4, int8 = Blockwise("int4", 128, "stochastic"), Blockwise("int8", 256, "dither")
    for codec, omega in ((int4, 0.0275), (int8, 4.9e-5)):
        mean = Simulation(codec, {"p": (n,)}, world_size=world_size).step(grads)[0]
        assert math.isclose(error_of(mean, exact), omega * (kappa + 1), rel_tol=0.1)
        gathered = replace(codec, pattern="all_gather")
        mean = Simulation(gathered, {"p": (n,)}, world_size=world_size).step(grads)[0]
        assert math.isclose(error_of(mean, exact), omega * kappa, rel_tol=0.1)


def test_errors_of_entries_in_16_bits_cancel_with_a_dither() -> None:
    """The bits that all ranks know are shifted there, too."""
    shapes = {str(index): (100,) for index in range(200)}
    x = gauss(torch.Generator().manual_seed(0), 20_000)

    def error(count: int) -> float:
        codec = Blockwise("int8", 256, "dither", pattern="all_gather")
        return error_of(Simulation(codec, shapes, world_size=count).step([x] * count)[0], x)

    assert error(4) < error(1) / 10


@pytest.mark.parametrize("world_size", [2, 4])
def test_errors_of_equal_gradients_cancel_with_a_dither(world_size: int) -> None:
    """The draws of n ranks are 1 / n apart, so that their grids are one n times as fine."""
    n, omega = 2**17, 4.9e-5
    x = gauss(torch.Generator().manual_seed(0), n)
    for pattern, second in (("all_gather", 0.0), ("two_phase", omega)):
        codec = Blockwise("int8", 256, "dither", pattern=pattern)  # type: ignore[arg-type]
        mean = Simulation(codec, {"p": (n,)}, world_size=world_size).step([x] * world_size)[0]
        assert math.isclose(error_of(mean, x), omega / world_size**2 + second, rel_tol=0.1)


def test_a_bucket_that_would_not_shrink_travels_as_it_is() -> None:
    ranks = Simulation("int8", {"p": (50,)}, world_size=4)
    grads = [torch.randn(50) for _ in range(4)]
    assert torch.equal(
        ranks.step(grads)[0], Simulation("none", {"p": (50,)}, world_size=4).step(grads)[0]
    )
    assert ranks.requests == [("all_reduce", 200)]


@pytest.mark.parametrize("format", ["mx_e4m3", "mx_e5m2"])
def test_mx_is_a_format_of_fp8_with_blocks_and_rounding_of_its_own(format: str) -> None:
    expected = ErrorFeedback(Blockwise(format, 32))
    assert commhooks.make("fp8", format=format) == expected
    assert commhooks.make("fp8", format=format, block=32, rounding="nearest") == expected
    for option in ({"block": 256}, {"block": 0}, {"rounding": "stochastic"}):
        with pytest.raises(ValueError, match=r"fp8\(format='mx_e.m.'\) has blocks of 32 and round"):
            commhooks.make("fp8", format=format, **option)
    for block in (0, 100):
        with pytest.raises(ValueError, match="Blockwise"):
            commhooks.make("fp8", block=block)


@pytest.mark.parametrize(("world_size", "collective"), [(2, "all_gather"), (8, "all_reduce")])
def test_codecs_are_gathered_only_where_that_is_less(world_size: int, collective: str) -> None:
    grads = [torch.randn(1000, generator=torch.Generator().manual_seed(i)) for i in range(8)]
    ranks = Simulation(QSGD(), {"p": (1000,)}, world_size=world_size)
    mean = ranks.step(grads[:world_size])[0]
    assert [name for name, _ in ranks.requests] == [collective]
    dense = 4 * 1000 * 2 * (world_size - 1) / world_size
    assert sum(ranks.wire_bytes) <= dense
    exact = torch.stack(grads[:world_size]).mean(0)
    assert (mean - exact).norm() < QSGD().traits.error.variance ** 0.5 * exact.norm()


def test_codecs_are_not_gathered_where_16_bits_sent_densely_are_less() -> None:
    # The residual is added in float32, but an all-reduce would send 16 bits.
    layout = Layout(["p"], [(4096,)])
    for scheme in (QSGD(), ErrorFeedback(QSGD())):
        bucket = Bucket(torch.randn(4096).half(), layout, world_size=5)
        assert next(scheme.exchange(bucket)).name == "all_reduce"


@pytest.mark.parametrize("scheme", [QSGD(), TernGrad()], ids=["qsgd", "terngrad"])
def test_ranks_round_to_random_levels_independently(scheme: Any) -> None:
    x, layout = torch.randn(4096), Layout(["p"], [(4096,)])
    payloads = [
        scheme.encode(x, Bucket(x, layout, step=step, rank=rank, world_size=2))["payload"]
        for step, rank in ((1, 0), (1, 0), (1, 1), (2, 0))
    ]
    assert torch.equal(payloads[0], payloads[1])
    assert not torch.equal(payloads[0], payloads[2])
    assert not torch.equal(payloads[0], payloads[3])
