"""Quantised schemes, of one level and of two: their errors are those of theory, and their bytes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import commhooks
from commhooks import ErrorFeedback, Scheme, Simulation, make
from commhooks.core import Bucket, Layout
from commhooks.research.baselines import QSGD, TernGrad
from commhooks.schemes import Blockwise, Eden, Hierarchical, RandomK, TopK, TwoPhaseCast
from commhooks.schemes.eden import _levels
from tests.unit.references import rank_gradients

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


# ---- one bit where most entries are exact zeros: what its page says of the residual


def residual_of(share: float, *, rotate: bool, block: int) -> float:
    """|e| / |g| after 300 steps of one gradient of ones and zeros, on two ranks."""
    grad = torch.zeros(2048)
    grad[torch.randperm(2048, generator=torch.Generator().manual_seed(7))[: int(2048 * share)]] = 1
    ranks = Simulation("onebit", {"p": (2048,)}, world_size=2, rotate=rotate, block=block)
    for _ in range(300):
        ranks.step([grad, grad])
    return float(ranks.memory(0).norm() / grad.norm())


@pytest.mark.parametrize("share", [1 / 4, 1 / 16, 1 / 32])
def test_the_residual_of_zeros_grows_with_one_over_their_share(share: float) -> None:
    # Zeros swing between 0 and the mean S of |c|, and a gradient of 1 drains where S = 1: then
    # (1 - p) S / 2 + p |c| = S, so that |c| is (1 + p) / (2 p).
    assert residual_of(share, rotate=False, block=2048) == pytest.approx(1 / (2 * share), rel=0.2)


@pytest.mark.parametrize("share", [1.0, 1 / 16, 1 / 256])
def test_rotated_blocks_keep_the_residual_small_whatever_is_zero(share: float) -> None:
    assert residual_of(share, rotate=True, block=1024) < 2.5


@pytest.mark.parametrize(
    ("bits", "levels"), [(1, [0.7979]), (2, [0.4528, 1.510]), (3, [0.2451, 0.7560, 1.344, 2.152])]
)
def test_levels_are_those_of_lloyd_and_max(bits: int, levels: list[float]) -> None:
    computed = _levels(bits)
    torch.testing.assert_close(computed[2 ** (bits - 1) :], torch.tensor(levels), atol=5e-4, rtol=0)
    torch.testing.assert_close(computed, -computed.flip(0), atol=1e-6, rtol=0)


@pytest.mark.parametrize(("bits", "variance"), [(1, 0.571), (2, 0.1325), (3, 0.0355), (4, 0.0094)])
@pytest.mark.parametrize("draw", DRAWS)
def test_the_variance_does_not_depend_on_the_gradient(bits, variance, draw):
    x = draw(torch.Generator().manual_seed(0), 2**18)
    codec = Eden(bits, block=2048, pattern="all_gather")
    mean = Simulation(codec, {"p": tuple(x.shape)}, world_size=1).step([x])[0]
    assert math.isclose(error_of(mean, x), variance, rel_tol=0.05)


def blocks(*values: float) -> torch.Tensor:
    """64 blocks that begin with the values, and are zero otherwise."""
    x = torch.zeros(64, 1024)
    x[:, : len(values)] = torch.tensor(values)
    return x.flatten()


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "values",
    # The last three: the worst found by a search over blocks of up to 16 entries at 2 to 4 bits.
    [(1, 1), (1, 1, 1), (1,) * 4, (1,) * 8, (1,) * 16, (1, 1, 0.92, 1), (1, 0.83, 1), (0, 1, 0.98)],
    ids=str,
)
def test_no_sparse_block_exceeds_the_variance(bits: int, values: tuple[float, ...]) -> None:
    x, codec = blocks(*values), Eden(bits, pattern="all_gather")
    mean = Simulation(codec, {"p": tuple(x.shape)}, world_size=1).step([x])[0]
    assert error_of(mean, x) <= codec.traits.error.variance


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_two_phases_round_twice_and_independently(world_size: int) -> None:
    """Rotated alike, half of the sum of two ranks' levels are zeros, and what is lost is biased."""
    generator = torch.Generator().manual_seed(world_size)
    grads = [torch.randn(2**18, generator=generator) for _ in range(world_size)]
    exact = torch.stack(grads).double().mean(0)
    mean = Simulation(Eden(1), {"p": (2**18,)}, world_size=world_size).step(grads)[0]
    assert math.isclose(error_of(mean, exact), 1.571**2 - 1, rel_tol=0.03)


FP32 = TwoPhaseCast(torch.float32)
INT8, INT4 = Blockwise("int8", 256), Blockwise("int4", 128, rotate=True)
N = 10_001


def ranks_of(scheme: Scheme, world_size: int, n: int = N) -> Simulation:
    return Simulation(scheme, {"p": (n,)}, world_size=world_size)


@pytest.mark.parametrize(("world_size", "local_size"), [(4, 2), (8, 2), (8, 4), (6, 3), (6, 4)])
def test_all_ranks_get_the_same_mean(world_size: int, local_size: int) -> None:
    for inside, between, error in ((FP32, FP32, 1e-6), (FP32, INT8, 0.015), (INT8, INT4, 0.25)):
        for n in (N, 1, 127, 1025):
            ranks = ranks_of(Hierarchical(inside, between, local_size), world_size, n)
            grads = rank_gradients(world_size, 0, n)
            means = ranks.step(grads)
            exact = torch.stack(grads).mean(0)
            assert all(torch.equal(mean, means[0]) for mean in means)
            assert (means[0] - exact).norm() <= error * exact.norm() + 1e-6


def test_both_levels_decode_the_dither_of_their_own_ranks() -> None:
    """A draw of another rank would leave up to a step: several times this error."""
    n, omega, half = 2**17, 4.9e-5, TwoPhaseCast(torch.float16)
    dithered, grads = Blockwise("int8", 256, "dither"), rank_gradients(8, 0, n)
    exact = torch.stack(grads).mean(0)
    for inside, between, roundings in ((dithered, half, 1), (half, dithered, 2)):
        mean = ranks_of(Hierarchical(inside, between, 4), 8, n).step(grads)[0]
        error = (mean - exact).square().sum() / exact.square().sum()
        assert math.isclose(error, roundings * omega, rel_tol=0.1)


def test_bytes_between_nodes_are_those_of_a_part() -> None:
    n = 2**16
    ranks = ranks_of(Hierarchical(INT8, INT4, 4), 16, n)
    ranks.step(rank_gradients(16, 0, n))
    eight, four = INT8.payload_bytes(n), INT4.payload_bytes(n)
    inside, across, back, handed_on = ranks.wire_bytes
    assert inside == eight * 3 / 4
    assert across == back == four / 4 * 3 / 4
    assert handed_on == four * 3 / 4


def test_the_node_comes_from_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    scheme = Hierarchical(INT8, INT4)
    assert scheme.node_size(8) == 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert [scheme.node_size(world_size) for world_size in (4, 6, 7, 8, 12)] == [4, 2, 1, 4, 4]
    assert Hierarchical(INT8, INT4, local_size=2).node_size(8) == 2


def test_one_level_is_the_codec_itself() -> None:
    grads = rank_gradients(4, 0, N)
    for local_size, codec in ((1, INT4), (4, INT8)):
        actual = ranks_of(Hierarchical(INT8, INT4, local_size), 4).step(grads)
        assert torch.equal(actual[0], ranks_of(codec, 4).step(grads)[0])


def test_sixteen_bits_round_stochastically() -> None:
    n = 64
    x = torch.full((n,), 1 + 2.0**-10)  # an eighth of the way between two bfloat16 numbers
    ranks = ranks_of(make("bf16", stochastic=True), 2, n)
    means = torch.stack([ranks.step([x, x])[0] for _ in range(400)]).double()
    assert set(means.unique().tolist()) <= {1.0, 1 + 2.0**-8, 1 + 2.0**-7}
    deviation = 2.0**-7 / math.sqrt(means.numel())
    assert abs(means.mean() - x[0]) < 5 * deviation
    nearest = ranks_of(make("bf16", fp32_sum=True), 2, n).step([x, x])[0]
    assert (nearest == 1.0).all()
