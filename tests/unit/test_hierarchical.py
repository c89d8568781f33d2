"""Two levels: codecs inside a node and between nodes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from commhooks import Scheme, Simulation, make
from commhooks.schemes import Blockwise, Hierarchical, TwoPhaseCast

FP32 = TwoPhaseCast(torch.float32)
INT8, INT4 = Blockwise("int8", 256), Blockwise("int4", 128, rotate=True)
N = 10_001


def gradients(world_size: int, step: int = 0, n: int = N) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step + 1)
    return [torch.randn(n, generator=generator) for _ in range(world_size)]


def ranks_of(scheme: Scheme, world_size: int, n: int = N) -> Simulation:
    return Simulation(scheme, {"p": (n,)}, world_size=world_size)


@pytest.mark.parametrize(("world_size", "local_size"), [(4, 2), (8, 2), (8, 4), (6, 3), (6, 4)])
def test_all_ranks_get_the_same_mean(world_size: int, local_size: int) -> None:
    for inside, between, error in ((FP32, FP32, 1e-6), (FP32, INT8, 0.015), (INT8, INT4, 0.25)):
        for n in (N, 1, 127, 1025):
            ranks = ranks_of(Hierarchical(inside, between, local_size), world_size, n)
            grads = gradients(world_size, n=n)
            means = ranks.step(grads)
            exact = torch.stack(grads).mean(0)
            assert all(torch.equal(mean, means[0]) for mean in means)
            assert (means[0] - exact).norm() <= error * exact.norm() + 1e-6


def test_both_levels_decode_the_dither_of_their_own_ranks() -> None:
    """A draw of another rank would leave up to a step: several times this error."""
    n, omega, half = 2**17, 4.9e-5, TwoPhaseCast(torch.float16)
    dithered, grads = Blockwise("int8", 256, "dither"), gradients(8, n=n)
    exact = torch.stack(grads).mean(0)
    for inside, between, roundings in ((dithered, half, 1), (half, dithered, 2)):
        mean = ranks_of(Hierarchical(inside, between, 4), 8, n).step(grads)[0]
        error = (mean - exact).square().sum() / exact.square().sum()
        assert math.isclose(error, roundings * omega, rel_tol=0.1)


def test_bytes_between_nodes_are_those_of_a_part() -> None:
    n = 2**16
    ranks = ranks_of(Hierarchical(INT8, INT4, 4), 16, n)
    ranks.step(gradients(16, n=n))
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
    grads = gradients(4)
    for local_size, codec in ((1, INT4), (4, INT8)):
        got = ranks_of(Hierarchical(INT8, INT4, local_size), 4).step(grads)
        assert torch.equal(got[0], ranks_of(codec, 4).step(grads)[0])


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
