"""Schedules, the guard, rows that ranks agree on, 1-bit Adam, outer steps: plain lines each."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from commhooks import ErrorFeedback, HookState, Simulation, make
from commhooks.local._fragments import Fragment
from commhooks.optim import OneBitAdam
from commhooks.research.baselines import RandomBlock
from commhooks.schemes import TopK
from commhooks.wrappers import DelayedStart, Guard, PeriodicDense
from commhooks.wrappers import _guard as _guard
from tests.unit.references import (
    all_equal,
    assert_feedback,
    close,
    gathered,
    gradients,
    in_two_phases,
    largest,
    mean,
    normal,
    signed,
)

N = 1024


def zeros(world_size: int) -> list[Tensor]:
    return [torch.zeros(N, dtype=torch.float64) for _ in range(world_size)]


def sent(c: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Sends the 51 largest of the corrected gradients, and keeps the rest."""
    return gathered(lambda entries, *_: largest(entries, 51), c)


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
        grads = gradients(2, step, N)
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
                got = ranks.step(grads)
        else:
            got = ranks.step(grads)
        close(all_equal(got), expected)
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
        grads = gradients(3, step, N)
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
        grads = gradients(3, step, N)
        c = [g + kept for g, kept in zip(grads, e, strict=True)]
        got = all_equal(ranks.step(grads))
        stretch = (got != 0).double()
        edges = int((stretch != stretch.roll(1)).sum())
        assert (int(stretch.sum()), edges) == (N // 4, 2), "one stretch, around the end at most"
        close(got, mean(c) * stretch)
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
        grads = gradients(2, step, N)
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
