"""DGC, DeMo, signSGD: against computations of their own, written down plainly."""

from __future__ import annotations

import itertools
import math
from functools import partial

import pytest
import torch
from torch import Tensor

from commhooks import Simulation
from commhooks.schemes import DGC, DeMo, DenseMomentum, SignSGD
from tests.unit.references import rank_gradients

SHAPES = {"w": (40, 30), "b": (40,)}
N = 1240
random_gradients = partial(rank_gradients, numel=N)


@pytest.mark.parametrize("nesterov", [False, True])
def test_dgc_is_what_the_paper_says(nesterov: bool) -> None:
    scheme = DGC(0.01, 0.9, nesterov, clip=20.0, sampled=False)
    ranks = Simulation(scheme, SHAPES, world_size=2)
    u, v = torch.zeros(2, N), torch.zeros(2, N)
    for step in range(5):
        grads = random_gradients(2, step)
        expected = torch.zeros(N)
        for rank, grad in enumerate(grads):
            parts = []
            for part in grad.split([1200, 40]):
                most = 20.0 / math.sqrt(2)
                parts.append(part * min(1.0, most / float(part.norm())))
            g = torch.cat(parts)
            if nesterov:
                u[rank] = 0.9 * (u[rank] + g)
                v[rank] += u[rank] + g
            else:
                u[rank] = 0.9 * u[rank] + g
                v[rank] += u[rank]
            sent = v[rank].abs().topk(math.ceil(0.01 * N)).indices
            expected[sent] += v[rank][sent] / 2
            u[rank][sent] = v[rank][sent] = 0.0
        mean = ranks.step(grads)[0]
        torch.testing.assert_close(mean, expected)
        torch.testing.assert_close(ranks.memory(1, "dgc.momentum"), u[1])
        torch.testing.assert_close(ranks.memory(1, "dgc.unsent"), v[1])


def test_dgc_warms_up_in_geometric_stages() -> None:
    scheme = DGC(0.001, warmup_steps=100)
    ratios = [scheme.ratio_at(step) for step in range(0, 120, 20)]
    assert ratios[0] == 0.25
    assert ratios[5] == 0.001
    steps = [a / b for a, b in itertools.pairwise(ratios)]
    assert max(steps) == pytest.approx(min(steps))


def test_dgc_leaves_vectors_to_dense_momentum() -> None:
    ranks = Simulation("dgc", SHAPES, world_size=2, ratio=0.01)
    m = torch.zeros(40)
    for step in range(4):
        grads = random_gradients(2, step)
        mean = ranks.step(grads)[0]
        m = 0.9 * m + torch.stack(grads).mean(0)[1200:]
        torch.testing.assert_close(mean[1200:], m)
        assert int((mean[:1200] != 0).sum()) <= 2 * 12


@pytest.mark.parametrize("nesterov", [False, True])
def test_dense_momentum_is_that_of_torch(nesterov: bool) -> None:
    ranks = Simulation(DenseMomentum(0.9, nesterov), SHAPES, world_size=2)
    p = torch.zeros(N, requires_grad=True)
    optimizer = torch.optim.SGD([p], lr=1.0, momentum=0.9, nesterov=nesterov)
    for step in range(4):
        grads = random_gradients(2, step)
        p.grad = torch.stack(grads).mean(0)
        before = p.detach().clone()
        optimizer.step()
        torch.testing.assert_close(ranks.step(grads)[0], before - p.detach())


def cosines() -> Tensor:
    i = torch.arange(64, dtype=torch.float64)
    matrix = torch.cos(math.pi * (i + 0.5) * i[:, None] / 64) * math.sqrt(2 / 64)
    matrix[0] /= math.sqrt(2)
    return matrix


@pytest.mark.parametrize("sign", [False, True])
def test_demo_is_what_the_paper_says(sign: bool) -> None:
    high, wide, k = 70, 130, 16  # padded to 128 x 192: six tiles
    c = cosines()
    ranks = Simulation(DeMo(k, 0.9, sign), {"w": (high, wide)}, world_size=3)
    momenta = [torch.zeros(high, wide, dtype=torch.float64) for _ in range(3)]

    def tiles(matrix: Tensor) -> Tensor:
        whole = torch.zeros(128, 192, dtype=torch.float64)
        whole[: matrix.shape[0], : matrix.shape[1]] = matrix
        return whole.view(2, 64, 3, 64).transpose(1, 2).reshape(6, 64, 64)

    def whole(parts: Tensor) -> Tensor:
        return parts.view(2, 3, 64, 64).transpose(1, 2).reshape(128, 192)[:high, :wide]

    for step in range(3):
        grads = random_gradients(3, step, numel=high * wide)
        total, count = torch.zeros(6, 4096), torch.zeros(6, 4096)
        for rank, grad in enumerate(grads):
            momenta[rank] = 0.9 * momenta[rank] + grad.view(high, wide).double()
            coefficients = (c @ tiles(momenta[rank]) @ c.T).reshape(6, 4096)
            places = coefficients.abs().topk(k, dim=1).indices
            values = coefficients.gather(1, places).bfloat16()
            sent = torch.zeros(6, 4096, dtype=torch.float64).scatter(1, places, values.double())
            momenta[rank] -= whole(c.T @ sent.view(6, 64, 64) @ c)
            total += sent
            count += torch.zeros(6, 4096).scatter(1, places, 1.0)
        mean = whole(c.T @ (total / count.clamp(min=1)).double().view(6, 64, 64) @ c).flatten()
        actual = ranks.step(grads)[0].double()
        if sign:
            sure = mean.abs() > 1e-4
            assert torch.equal(actual[sure], mean[sure].sign())
        else:
            torch.testing.assert_close(actual, mean, rtol=0, atol=1e-4)
        torch.testing.assert_close(
            ranks.memory(2, "demo.momentum").double(), momenta[2].flatten(), rtol=0, atol=1e-3
        )


def test_signs_are_the_majority() -> None:
    grads = random_gradients(3, 0)
    for pattern in ("two_phase", "all_gather"):
        actual = Simulation(SignSGD(0.5, pattern), SHAPES, world_size=3).step(grads)[0]
        votes = sum(torch.where(grad >= 0, 1.0, -1.0) for grad in grads)
        assert torch.equal(actual, 0.5 * torch.sign(torch.as_tensor(votes)))


def test_signs_of_a_tie_are_positive_everywhere() -> None:
    x = random_gradients(1, 0)[0]
    means = Simulation(SignSGD(), SHAPES, world_size=2).step([x, -x])
    assert all(torch.equal(mean, torch.ones(N)) for mean in means)
