"""Feedback, schedules, the guard, 1-bit Adam and outer steps, against a few plain lines each."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from commhooks import ErrorFeedback, HookState, Simulation, make
from commhooks.core import Layout
from commhooks.local._fragments import Fragment
from commhooks.optim import OneBitAdam
from commhooks.research.baselines import RandomBlock
from commhooks.schemes import Blockwise, Eden, TopK
from commhooks.wrappers import EF21, AveragedFeedback, DelayedStart, Guard, PeriodicDense, Scaled
from commhooks.wrappers import _guard as _guard
from tests.unit.references import (
    Lossy,
    all_equal,
    assert_feedback,
    close,
    flips_of,
    gathered,
    in_two_phases,
    largest,
    levels,
    mean,
    mostly_close,
    normal,
    rank_gradients,
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
        (grad,) = rank_gradients(1, step, N)
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
        grads = rank_gradients(world_size, step, N)
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
        grads = rank_gradients(3, step, N)
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
        grads = rank_gradients(3, step, N)
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
        grads = rank_gradients(6, step, 4096)
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


def sent(c: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Sends the 5 % largest of the corrected gradients, and keeps the rest."""
    return gathered(lambda entries, *_: largest(entries, N // 20), c)


def flushed(c: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Sends all, and keeps nothing."""
    return mean(c), zeros(len(c))


# ---- schedules


def test_periodic_dense_sends_what_was_held_back_in_every_third_step() -> None:
    ranks = Simulation(PeriodicDense(make("topk", ratio=0.05), 3), {"p": (N,)}, world_size=3)
    assert_feedback(ranks, lambda c, step: flushed(c) if step % 3 == 2 else sent(c), 8)


def test_delayed_start_is_dense_and_then_the_scheme() -> None:
    ranks = Simulation("topk", {"p": (N,)}, world_size=2, ratio=0.05, start_step=3)
    assert_feedback(ranks, lambda c, step: flushed(c) if step < 3 else sent(c), 6)


def test_a_delayed_start_hands_the_residual_of_what_ran_before_on() -> None:
    scheme = DelayedStart(make("none"), 2, before=make("topk", ratio=0.05))
    ranks = Simulation(scheme, {"p": (N,)}, world_size=2)
    assert_feedback(ranks, lambda c, step: sent(c) if step < 2 else flushed(c), 4)


def test_the_guard_goes_dense_for_as_long_as_it_says_and_flushes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A look every second step; the first finds a residual above 1.5 gradients."""
    for name, value in (("_MAX_RESIDUAL", 1.2), ("_REST", 3), ("_GROWTH", 1e9)):
        monkeypatch.setattr(_guard, name, value)
    watched = ErrorFeedback(TopK(0.05))
    ranks = Simulation(Guard(watched, every=2), {"p": (N,)}, world_size=2)
    e, dense_until, seen = zeros(2), 0, []
    for step in range(9):
        grads = rank_gradients(2, step, N)
        seen.append(step < dense_until)
        if step < dense_until:
            expected, e = flushed([g + kept for g, kept in zip(grads, e, strict=True)])
        else:
            held = math.sqrt(mean([residual.square().sum() for residual in e]))
            size = math.sqrt(mean([grad.double().square().sum() for grad in grads]))
            if step % 2 and held / size > 1.2:
                dense_until = step + 1 + 3
            expected, e = sent([g + kept for g, kept in zip(grads, e, strict=True)])
        if dense_until == step + 4:
            with pytest.warns(RuntimeWarning, match="the residual is .*Averaging .* for 3 steps"):
                actual = ranks.step(grads)
        else:
            actual = ranks.step(grads)
        close(all_equal(actual), expected)
    assert True in seen
    assert False in seen[seen.index(True) :]


# ---- places that ranks agree on


def test_aligned_topk() -> None:
    """A sketch of each row by signs; the rows whose summed sketch is largest travel."""
    row, directions = 32, 3
    ranks = Simulation(
        "aligned_topk", {"p": (N,)}, world_size=3, ratio=0.2, row=row, directions=directions
    )
    e, chosen = zeros(3), []
    for step in range(5):
        grads = rank_gradients(3, step, N)
        c = [(g + kept).view(-1, row) for g, kept in zip(grads, e, strict=True)]
        signs = sketch_signs(step, row, directions)
        energy = mean([corrected @ signs for corrected in c]).square().sum(1)
        rows = energy.topk(int(0.2 * N / row)).indices
        chosen.append(set(rows.tolist()))
        expected = torch.zeros(N // row, row, dtype=torch.float64)
        expected[rows] = mean(c)[rows]
        for held_rows in c:
            held_rows[rows] = 0.0
        e = [held_rows.flatten() for held_rows in c]
        close(all_equal(ranks.step(grads)), expected.flatten())
        for rank in range(3):
            close(ranks.memory(rank), e[rank])
    assert len(set(map(frozenset, chosen))) > 1


def sketch_signs(step: int, row: int, directions: int) -> Tensor:
    """The draw of a step: its begin in a table of signs, keyed by name, purpose and step."""
    from commhooks.core import Bucket, Layout

    generator = Bucket(torch.zeros(0), Layout([], []), step=step).generator("p/sketch", shared=True)
    begin, count = int(torch.randint(2**16, (), generator=generator)), row * directions
    table = torch.randint(0, 2, (2**16 + count,), generator=torch.Generator().manual_seed(0))
    return 2.0 * table[begin : begin + count].view(row, directions).double() - 1.0


def test_a_random_block_sends_one_stretch_and_holds_the_rest() -> None:
    ranks, e = Simulation(ErrorFeedback(RandomBlock(0.25)), {"p": (N,)}, world_size=3), zeros(3)
    for step in range(4):
        grads = rank_gradients(3, step, N)
        c = [g + kept for g, kept in zip(grads, e, strict=True)]
        actual = all_equal(ranks.step(grads))
        stretch = (actual != 0).double()
        edges = int((stretch != stretch.roll(1)).sum())
        assert (int(stretch.sum()), edges) == (N // 4, 2), "one stretch, around the end at most"
        close(actual, mean(c) * stretch)
        e = [corrected * (1 - stretch) for corrected in c]
        for rank in range(3):
            close(ranks.memory(rank), e[rank])


# ---- 1-bit Adam


def test_onebit_adam_sends_gradients_and_then_momenta() -> None:
    freeze, block = 3, 256
    ranks = Simulation(
        "onebit_adam", {"p": (N,)}, world_size=2, freeze_step=freeze, beta1=0.8, block=block
    )
    m, e = torch.zeros(N, dtype=torch.float64), zeros(2)
    for step in range(7):
        grads = rank_gradients(2, step, N)
        if step < freeze:
            expected = mean(grads)
            m = 0.8 * m + 0.2 * expected
        else:
            c = [0.8 * m + 0.2 * g + kept for g, kept in zip(grads, e, strict=True)]
            m, e = in_two_phases(lambda entries, *_: signed(entries, block), c, block)
            expected = m
        close(all_equal(ranks.step(grads)), expected)
        close(ranks.memory(1, "onebit_adam.momentum"), m)
        close(ranks.memory(1), e[1], 1e-4)


def test_the_optimizer_is_adam_with_a_second_moment_that_stays() -> None:
    lr, beta1, beta2, eps, decay, freeze = 0.1, 0.9, 0.99, 1e-3, 0.01, 3
    hook = HookState("onebit_adam", freeze_step=freeze, beta1=beta1)
    p = nn.Parameter(normal(50, 1))
    optimizer = OneBitAdam([p], hook, lr, beta2=beta2, eps=eps, weight_decay=decay)
    x, m, v = p.detach().double(), torch.zeros(50).double(), torch.zeros(50).double()
    for step in range(6):
        p.grad = normal(50, 2, step)
        hook.engine.step += 1  # what the hook has counted once backward is over
        g = p.grad.double()
        if step < freeze:
            m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
        else:
            m = g  # momenta arrive
        corrected = v / (1 - beta2 ** min(step + 1, freeze))
        x = x - lr * decay * x
        x = x - lr * (m / (1 - beta1 ** (step + 1))) / (corrected.sqrt() + eps)
        optimizer.step()
        close(p.detach(), x, 1e-5)


# ---- the outer step of DiLoCo


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("late", [False, True])
def test_outer_steps(nesterov: bool, late: bool) -> None:
    lr, momentum = 0.7, 0.9
    p = nn.Parameter(normal(30, 1).view(5, 6))
    fragment = Fragment(0, ["p"], [p], place=0, is_last=True)
    outer = p.detach().double().clone()
    velocity = torch.zeros_like(outer)
    for step in range(4):
        with torch.no_grad():
            p += 0.1 * normal(30, 2, step).view(5, 6)
        fragment.compute_outer_gradient()
        delta = outer - p.detach().double()
        close(fragment.buffer(), delta.flatten())
        arrived = delta + 0.05 * normal(30, 3, step).view(5, 6)  # the mean with other ranks
        local = p.detach().double() + 0.01
        with torch.no_grad():
            p += 0.01  # training goes on meanwhile
        fragment.apply(arrived.float().flatten(), lr, momentum, nesterov, late=late)
        velocity = momentum * velocity + arrived
        outer = outer - lr * (arrived + momentum * velocity if nesterov else velocity)
        close(p.detach(), (local + outer) / 2 if late else outer)
