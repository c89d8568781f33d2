"""Error feedback in its forms, against a few plain lines each."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from commhooks import ErrorFeedback, Simulation, make
from commhooks.core import Layout
from commhooks.schemes import Blockwise, Eden, TopK
from commhooks.wrappers import EF21, AveragedFeedback, Scaled
from tests.unit.references import (
    Lossy,
    all_equal,
    assert_feedback,
    close,
    flips_of,
    gathered,
    gradients,
    in_two_phases,
    largest,
    levels,
    mean,
    mostly_close,
    normal,
    rotated_levels,
    signed,
)

N = 1536
world_sizes = pytest.mark.parametrize("world_size", [1, 2, 3, 5])


def zeros(world_size: int, n: int = N) -> list[Tensor]:
    return [torch.zeros(n, dtype=torch.float64) for _ in range(world_size)]


def sign_of(block: int) -> Lossy:
    return lambda c, shard, step: signed(c, block)


@world_sizes
def test_topk_with_feedback(world_size: int) -> None:
    ranks = Simulation("topk", {"p": (N,)}, world_size=world_size, ratio=0.02)
    assert_feedback(ranks, lambda c, _: gathered(lambda c, *_: largest(c, 30), c), 5)


@world_sizes
@pytest.mark.parametrize("block", [64, 2048])
def test_onebit_with_feedback(world_size: int, block: int) -> None:
    ranks = Simulation("onebit", {"p": (N,)}, world_size=world_size, block=block)
    near = partial(close, tolerance=1e-4)
    assert_feedback(ranks, lambda c, _: in_two_phases(sign_of(block), c, block), 5, near)


def test_signs_that_are_gathered_with_feedback() -> None:
    scheme = ErrorFeedback(Blockwise("sign", 128, pattern="all_gather"))
    ranks = Simulation(scheme, {"p": (N,)}, world_size=3)
    assert_feedback(ranks, lambda c, _: gathered(sign_of(128), c), 4)


@pytest.mark.parametrize("world_size", [1, 3, 5])  # means of two ranks' levels often are halfway
def test_int4_with_feedback(world_size: int) -> None:
    n, layout = 8192, Layout(["p"], [(8192,)])
    ranks = Simulation("int4", {"p": (n,)}, world_size=world_size)

    def lossy(c: Tensor, shard: int, step: int) -> Tensor:
        return rotated_levels(c, 7, 256, flips_of(layout, shard, step, n))

    assert_feedback(ranks, lambda c, step: in_two_phases(lossy, c, 256, step), 3, mostly_close)


def test_scaled_sends_a_share_and_keeps_the_rest() -> None:
    """Around a codec that says what it has not sent, as EDEN does: c - mean, of one rank."""
    codec = Eden(1, 128, pattern="all_gather")
    ranks = Simulation(ErrorFeedback(Scaled(codec)), {"p": (N,)}, world_size=1)
    e = torch.zeros(N, dtype=torch.float64)
    for step in range(4):
        (grad,) = gradients(1, step, N)
        bare = Simulation(codec, {"p": (N,)}, world_size=1)
        bare.engines[0].step = step
        sent = bare.step([(grad + e).float()])[0].double() / (1 + codec.traits.error.variance)
        e = grad + e - sent
        close(ranks.step([grad])[0], sent)
        close(ranks.memory(0), e)


# ---- EF21


@pytest.mark.parametrize("momentum", [0.0, 0.25])
@world_sizes
def test_ef21_of_topk(world_size: int, momentum: float) -> None:
    ranks = Simulation(EF21(TopK(0.1), momentum), {"p": (N,)}, world_size=world_size)
    booked, velocity = zeros(world_size), zeros(world_size)
    total = torch.zeros(N, dtype=torch.float64)
    for step in range(6):
        grads = gradients(world_size, step, N)
        sent = []
        for rank, grad in enumerate(grads):
            velocity[rank] = momentum * velocity[rank] + (1 - momentum) * grad
            sent.append(largest(velocity[rank] - booked[rank], N // 10))
            booked[rank] = booked[rank] + sent[-1]
        total = total + mean(sent)
        close(all_equal(ranks.step(grads)), total)
        close(total, mean(booked), 1e-9)
        for rank in range(world_size):
            close(ranks.memory(rank, "ef21.own"), booked[rank])
            close(ranks.memory(rank, "ef21.total"), total)
            if momentum:
                close(ranks.memory(rank, "ef21.velocity"), velocity[rank])


def test_ef21_of_signs_in_two_phases() -> None:
    """The second rounding is booked as sent by the rank that made it, so totals stay the mean."""
    ranks = Simulation(EF21(Blockwise("sign", 128)), {"p": (N,)}, world_size=3)
    booked, total = zeros(3), torch.zeros(N, dtype=torch.float64)
    for step in range(5):
        grads = gradients(3, step, N)
        difference = [grad - held for grad, held in zip(grads, booked, strict=True)]
        arrived, unsent = in_two_phases(sign_of(128), difference, 128)
        booked = [g + d - u for g, d, u in zip(booked, difference, unsent, strict=True)]
        total = total + arrived
        close(all_equal(ranks.step(grads)), total, 1e-4)
        close(ranks.memory(1, "ef21.own"), booked[1], 1e-4)
        close(mean(booked), total, 1e-9)


def test_ef21_reaches_a_gradient_that_stays() -> None:
    """The mean of what arrives is the gradient itself once all differences were sent."""
    ranks = Simulation(EF21(TopK(0.25)), {"p": (400,)}, world_size=2)
    grads = [normal(400, 1), normal(400, 2)]
    for _ in range(4):
        arrived = ranks.step(grads)[0]
    close(arrived, mean(grads))


# ---- an average of errors, in 8 bits


@pytest.mark.parametrize("reset_every", [0, 3])
@pytest.mark.parametrize("decay", [0.0, 0.7])
def test_averaged_feedback(decay: float, reset_every: int) -> None:
    codec = Blockwise("int4", 64)
    shapes = {"a": (700,), "b": (N - 700,)}
    ranks = Simulation(AveragedFeedback(codec, decay, reset_every), shapes, world_size=3)
    e = zeros(3)
    for step in range(8):
        grads = gradients(3, step, N)
        c = [g + kept for g, kept in zip(grads, e, strict=True)]
        expected, unsent = in_two_phases(
            lambda c, *_: levels(c, 7, 64), c, 64, sizes=(700, N - 700)
        )
        for rank in range(3):
            new = decay * e[rank] + (1 - decay) * unsent[rank]
            if reset_every and step % reset_every == reset_every - 1:
                new = torch.zeros_like(new)
            e[rank] = torch.cat([levels(part, 127, 256) for part in new.split([700, N - 700])])
        mostly_close(all_equal(ranks.step(grads)), expected)


def test_sdp4bit() -> None:
    """Three nodes of two: 8-bit inside, rotated 4-bit between, an average of what both lost."""
    shapes = {"p": (4096,)}
    ranks = Simulation("sdp4bit", shapes, world_size=6, local_size=2)
    e, layout = zeros(6, 4096), Layout(["p"], [(4096,)])
    for step in range(3):
        grads = gradients(6, step, 4096)
        c = [g + kept for g, kept in zip(grads, e, strict=True)]
        unsent = [grad.clone() for grad in c]
        expected = torch.zeros(4096, dtype=torch.float64)
        for place, part in enumerate((slice(0, 2048), slice(2048, 4096))):
            sent = [levels(corrected[part], 127, 512) for corrected in c]
            for rest, part_sent in zip(unsent, sent, strict=True):
                rest[part] -= part_sent
            nodes = [mean(sent[:2]), mean(sent[2:4]), mean(sent[4:])]

            def between(x: Tensor, shard: int, step: int, place: int = place) -> Tensor:
                flips = flips_of(layout, shard, step, len(x) + 128, f"between/{place}/")
                return rotated_levels(x, 7, 128, flips)

            arrived, lost = in_two_phases(between, nodes, 128, step)
            expected[part] = arrived
            for node in range(3):  # of a mean over two: each mate's share
                unsent[2 * node + place][part] += 2 * lost[node]
        for rank in range(6):
            new = 0.8 * e[rank] + 0.2 * unsent[rank]
            e[rank] = levels(new, 127, 256)
        mostly_close(all_equal(ranks.step(grads)), expected)


def test_names_are_these_schemes() -> None:
    assert repr(make("onebit", block=64)) == repr(ErrorFeedback(Blockwise("sign", 64)))
    assert repr(make("int4")) == repr(ErrorFeedback(Blockwise("int4", 256, rotate=True)))
