"""Low-rank schemes: the formulas of the papers over several steps, bytes, dtypes and memory."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from commhooks import ErrorFeedback, Scheme, Simulation
from commhooks.core import Bucket, Layout
from commhooks.predict import model
from commhooks.schemes import ACPSGD, BatchedPowerSGD, PowerSGD
from commhooks.schemes.batched_powersgd import KEY as BATCHED_KEY
from commhooks.schemes.powersgd import KEY, payload_numel
from ddp_core import simulate
from tests.unit.references import all_equal, close, mean, normal, put, rank_gradients

# Two matrices of one shape are multiplied together.
SHAPES = {"w": (20, 30), "bias": (20,), "conv": (12, 4, 3, 3), "twin": (20, 30), "scalar": ()}
SIDES = {"w": (20, 30), "conv": (12, 36), "twin": (20, 30)}
LAYOUT = Layout(list(SHAPES), list(SHAPES.values()))
NUMEL = LAYOUT.numel
# float32, and the next step starts from this one's factors: errors grow by the ratio of singular
# values, about ten, a step.
NEAR = 2e-4

# Entries of both rounds: for rank 1, 2, 4 by the paper; and for rank 1, 8, 32 by torch's hook,
# which leaves matrices alone that would shrink to less than half.
ENTRIES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "resnet18 (CIFAR-10)": ((45935, 82260, 154910), (45935, 301154, 1226826)),
    "resnet50": ((136611, 219102, 384084), (136611, 714048, 2782504)),
    "vgg16": ((93547, 173678, 333940), (93547, 654464, 2592808)),
    "lstm": ((93488, 142507, 240545), (93488, 436621, 1613077)),
    "bert-base": ((322876, 523640, 923628), (323642, 1723600, 6523456)),
    "bert-large": ((801084, 1279608, 2234604), (802106, 4144592, 15604544)),
    "gpt2": ((321617, 521890, 922436), (321617, 1723528, 6530080)),
    "gpt2-xl": ((2284881, 3568162, 6134724), (2284881, 11267848, 42066592)),
    "llama-1b": ((902400, 1737216, 3406848), (902400, 6746112, 26781696)),
    "llama-8b": ((3152384, 6038528, 11810816), (3152384, 23355392, 92622848)),
}
# ResNet-18 of CIFAR-10 has other first and last layers than that of ImageNet.
CIFAR = {(64, 3, 7, 7): (64, 3, 3, 3), (1000, 512): (10, 512), (1000,): (10,)}


def orthonormal(columns: Tensor) -> Tensor:
    return torch.linalg.qr(columns).Q


def parts_of(flat: Tensor) -> dict[str, Tensor]:
    """Parameters by name, matrices as such."""
    parts = dict(zip(SHAPES, flat.double().split(LAYOUT.sizes), strict=True))
    return {name: part.view(SIDES.get(name, (-1,))) for name, part in parts.items()}


def flat_of(parts: dict[str, Tensor]) -> Tensor:
    return torch.cat([parts[name].flatten() for name in SHAPES])


def residuals(world_size: int) -> list[Tensor]:
    return [torch.zeros(NUMEL, dtype=torch.float64) for _ in range(world_size)]


def corrected(world_size: int, step: int, kept: list[Tensor]) -> list[dict[str, Tensor]]:
    """Gradients of the ranks with what they have kept."""
    pairs = zip(rank_gradients(world_size, step, NUMEL), kept, strict=True)
    return [parts_of(grad + residual) for grad, residual in pairs]


def vectors(c: list[dict[str, Tensor]]) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """The mean of what is no matrix, and what each rank has sent of it: all."""
    names = [name for name in SHAPES if name not in SIDES]
    sent = [{name: rank[name] for name in names} for rank in c]
    return {name: mean([rank[name] for rank in c]) for name in names}, sent


def kept_of(c: list[dict[str, Tensor]], sent: list[dict[str, Tensor]]) -> list[Tensor]:
    return [flat_of(rank) - flat_of(share) for rank, share in zip(c, sent, strict=True)]


def assert_kept(ranks: Simulation, kept: list[Tensor]) -> None:
    for rank, residual in enumerate(kept):
        close(ranks.memory(rank), residual, NEAR)


def factors(rank: int, side: int) -> dict[str, Tensor]:
    """A factor to start from: rows are columns of Q."""
    return {
        name: normal(rank * sides[side], 77, side).view(rank, -1) for name, sides in SIDES.items()
    }


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize("feedback", [False, True])
def test_powersgd(world_size: int, rank: int, feedback: bool) -> None:
    scheme = PowerSGD(rank, min_compression_rate=1.0)
    scheme = ErrorFeedback(scheme) if feedback else scheme
    ranks = Simulation(scheme, SHAPES, world_size=world_size)
    start = factors(rank, 1)
    put(ranks, KEY, start)
    q = {name: value.double().T for name, value in start.items()}
    e = residuals(world_size)
    for step in range(4):
        c = corrected(world_size, step, e)
        arrived, sent = vectors(c)
        for name in SIDES:
            p = orthonormal(mean([rank[name] @ q[name] for rank in c]))
            rights = [rank[name].T @ p for rank in c]
            q[name] = mean(rights)
            arrived[name] = p @ q[name].T
            for share, right in zip(sent, rights, strict=True):
                share[name] = p @ right.T
        close(
            all_equal(ranks.step(rank_gradients(world_size, step, NUMEL))), flat_of(arrived), NEAR
        )
        if feedback:
            e = kept_of(c, sent)
            assert_kept(ranks, e)


@pytest.mark.parametrize("world_size", [1, 3])
def test_acpsgd(world_size: int) -> None:
    ranks = Simulation("acpsgd", SHAPES, world_size=world_size, rank=2, min_compression_rate=1.0)
    p, q = factors(2, 0), factors(2, 1)
    for engine in ranks.engines:
        engine.memory.load({"acpsgd.p": dict(p), "acpsgd.q": dict(q)})
    left = {name: value.double().T for name, value in p.items()}
    right = {name: value.double().T for name, value in q.items()}
    e = residuals(world_size)
    for step in range(5):
        c = corrected(world_size, step, e)
        arrived, sent = vectors(c)
        for name in SIDES:
            if step % 2 == 0:
                basis = orthonormal(right[name])
                lefts = [rank[name] @ basis for rank in c]
                left[name] = mean(lefts)
                arrived[name] = left[name] @ basis.T
                shares = [factor @ basis.T for factor in lefts]
            else:
                basis = orthonormal(left[name])
                rights = [rank[name].T @ basis for rank in c]
                right[name] = mean(rights)
                arrived[name] = basis @ right[name].T
                shares = [basis @ factor.T for factor in rights]
            for whole, share in zip(sent, shares, strict=True):
                whole[name] = share
        close(
            all_equal(ranks.step(rank_gradients(world_size, step, NUMEL))), flat_of(arrived), NEAR
        )
        e = kept_of(c, sent)
        assert_kept(ranks, e)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_batched_powersgd(world_size: int) -> None:
    side, rank = math.ceil(math.sqrt(NUMEL)), 2  # the end of the square is not there
    ranks = Simulation("batched_powersgd", SHAPES, world_size=world_size, rank=rank)
    start = normal(rank * side, 78).view(rank, side)
    put(ranks, BATCHED_KEY, {"w": start})
    q, e = start.double().T, residuals(world_size)

    def square(flat: Tensor) -> Tensor:
        return torch.cat([flat, flat.new_zeros(side * side - NUMEL)]).view(side, side)

    for step in range(4):
        grads = rank_gradients(world_size, step, NUMEL)
        c = [square(grad.double() + kept) for grad, kept in zip(grads, e, strict=True)]
        p = orthonormal(mean([matrix @ q for matrix in c]))
        rights = [matrix.T @ p for matrix in c]
        q = mean(rights)
        close(all_equal(ranks.step(grads)), (p @ q.T).flatten()[:NUMEL], NEAR)
        pairs = zip(c, rights, strict=True)
        e = [(matrix - p @ right.T).flatten()[:NUMEL] for matrix, right in pairs]
        assert_kept(ranks, e)


@pytest.mark.parametrize("name", ["powersgd", "acpsgd"])
def test_factors_and_residuals_move_on_to_other_buckets(name: str) -> None:
    """The bucket of a matrix makes no difference: steps in one, in two, and in another one."""
    settled, moved = (
        Simulation(name, SHAPES, world_size=2, rank=2, min_compression_rate=1.0) for _ in range(2)
    )
    layout = settled.layout
    splits = ([[0, 1, 2, 3, 4]], [[2], [4, 3, 1, 0]], [[1, 2, 0, 3, 4]])
    for step in range(6):
        buckets = [layout.pick(places) for places in splits[step % 3]]
        order = [place for places in splits[step % 3] for place in places]
        grads = rank_gradients(2, step, NUMEL)
        expected = settled.step(grads)[0].split(layout.sizes)
        mixed = [torch.cat([grad.split(layout.sizes)[i] for i in order]) for grad in grads]
        actual = moved.step(mixed, buckets=buckets)[0].split([layout.sizes[i] for i in order])
        for place, part in zip(order, actual, strict=True):
            close(part, expected[place].double())


# ---- gradients that arrive exactly, or are zero


def low_rank(rows: int, columns: int, rank: int, *seed: int) -> Tensor:
    left, right = normal(rows * rank, *seed, 1), normal(rank * columns, *seed, 2)
    return (left.double().view(rows, rank) @ right.double().view(rank, columns)).flatten()


SQUARE = {"w": (33, 33)}
both = pytest.mark.parametrize(
    "scheme",
    [PowerSGD(rank=2, min_compression_rate=1), BatchedPowerSGD(rank=2)],
    ids=["layerwise", "batched"],
)


@both
def test_zeros_and_gradients_of_a_lower_rank_leave_live_factors(scheme: Scheme) -> None:
    ranks = Simulation(scheme, SQUARE, world_size=1)
    assert not ranks.step([torch.zeros(33 * 33, dtype=torch.float64)])[0].any()
    for rank in (1, 1, 2, 2):  # rows that carried rounding errors are drawn anew
        grad = low_rank(33, 33, rank, 5)
        torch.testing.assert_close(ranks.step([grad])[0], grad, atol=1e-10, rtol=1e-10)


def test_without_warm_start_every_step_draws_anew() -> None:
    for scheme in (PowerSGD(1, warm_start=False), BatchedPowerSGD(1, warm_start=False)):
        ranks = Simulation(scheme, {"w": (40, 30)}, world_size=1)
        first, second = (ranks.step([normal(1200)])[0] for _ in range(2))
        assert not torch.allclose(first, second)
        assert not scheme.keeps
        assert not list(ranks.engines[0].memory.items())


# ---- bytes


@pytest.mark.parametrize("name", ENTRIES)
def test_entries_of_the_tables(name: str) -> None:
    paper, hook = ENTRIES[name]
    shapes = [tuple(layer.shape) for layer in model(name.partition(" ")[0]).layers]
    if "CIFAR" in name:
        shapes = [CIFAR.get(shape, shape) for shape in shapes]
        assert sum(map(math.prod, shapes)) == 11_173_962
    assert tuple(payload_numel(shapes, rank, 0) for rank in (1, 2, 4)) == paper
    assert tuple(payload_numel(shapes, rank, 2) for rank in (1, 8, 32)) == hook


@pytest.mark.parametrize("rate", [0, 0.5, 1, 2, 10])
@pytest.mark.parametrize("rank", [1, 3, 100])
def test_an_exchange_sends_payload_numel(rank: int, rate: float) -> None:
    ranks = Simulation(PowerSGD(rank, rate), SHAPES, world_size=1)
    ranks.step([normal(NUMEL)])
    nbytes = 4 * payload_numel(list(SHAPES.values()), rank, rate)
    assert sum(sent for _, sent in ranks.requests) == nbytes


def test_bytes_of_a_matrix_and_of_a_square() -> None:
    shapes = {"w": (300, 200), "b": (300,)}
    requests = {}
    for scheme in (PowerSGD(4), ACPSGD(4), BatchedPowerSGD(4)):
        ranks = Simulation(scheme, shapes, world_size=2)
        for _ in range(2 if isinstance(scheme, ACPSGD) else 1):
            ranks.step([normal(60_300)] * 2)
        requests[type(scheme)] = [nbytes // 4 for _, nbytes in ranks.requests]
    assert requests == {
        PowerSGD: [4 * 300, 4 * 200 + 300],
        ACPSGD: [4 * 300 + 300, 4 * 200 + 300],  # in two steps
        BatchedPowerSGD: [4 * 246] * 2,
    }


@pytest.mark.parametrize("feedback", [True, False])
def test_a_bucket_that_is_not_compressed_is_a_plain_all_reduce(feedback: bool) -> None:
    scheme: Scheme = PowerSGD(rank=4)
    scheme = ErrorFeedback(scheme) if feedback else scheme
    ranks = Simulation(scheme, {"w": (4, 4), "b": (9,)}, world_size=2)
    grads = rank_gradients(2, 0, 25)
    assert torch.equal(ranks.step(grads)[0], grads[0] * 0.5 + grads[1] * 0.5)
    assert ranks.requests == [("all_reduce", 100)]


# ---- dtypes and memory of the caller


@both
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_gradients_are_computed_in_float32(scheme: Scheme, dtype: torch.dtype) -> None:
    narrow, wide = (Simulation(scheme, SHAPES, world_size=1) for _ in range(2))
    grad = normal(NUMEL).to(dtype)
    arrived, expected = narrow.step([grad])[0], wide.step([grad.float()])[0]
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(arrived.float(), expected, atol=eps, rtol=eps)


@both
def test_a_mean_that_overflows_float16_is_not_finite(scheme: Scheme) -> None:
    # Rank 1 with entries of 1e5: every factor fits in float32, the mean does not in float16.
    grad = torch.full((33 * 33,), 1e5)
    bucket = Bucket(grad, Layout(["w"], [(33, 33)]), output=torch.empty_like(grad).half())
    (result,) = simulate([scheme.exchange(bucket)])
    assert result.mean.isinf().all()
    assert result.finite is not None
    assert not result.finite


@pytest.mark.parametrize("scheme", [PowerSGD(2), ACPSGD(2), BatchedPowerSGD(2)], ids=repr)
@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_is_written_over_only_where_the_mean_goes_there(scheme, step, dtype):
    layout = Layout(["w", "b", "v"], [(32, 24), (7,), (24, 40)])
    generator = torch.Generator().manual_seed(0)
    before = torch.randn(layout.numel, generator=generator).to(dtype)
    residual = torch.randn(layout.numel, generator=generator)
    results = []
    for apart in (True, False):
        grad = before.clone()
        output = torch.empty_like(grad) if apart else grad
        bucket = Bucket(
            grad,
            layout,
            output=output,
            residual=residual.clone(),
            unsent=torch.empty_like(residual),
            step=step,
        )
        (result,) = simulate([scheme.exchange(bucket)])
        assert result.unsent is not None
        assert torch.equal(bucket.residual, residual)
        assert torch.equal(grad, before) == apart
        # One rank: what arrives and what is kept are the gradient and the residual.
        torch.testing.assert_close(
            result.mean.float() + result.unsent, before + residual, rtol=0, atol=2**-5
        )
        results.append((result.mean.clone(), result.unsent))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


# ---- what is remembered


def decaying() -> Tensor:
    left, right = (torch.linalg.qr(normal(n * 6, n).view(n, 6))[0] for n in (40, 30))
    return left * 0.25 ** torch.arange(6.0) @ right.T


@pytest.mark.parametrize(("old_rank", "new_rank"), [(3, 1), (1, 3)])
def test_rank_may_change_between_steps(old_rank: int, new_rank: int) -> None:
    ranks = Simulation(PowerSGD(rank=old_rank), {"w": (40, 30)}, world_size=1)
    tiny = 1e-12  # rows of the old length must not drown in new ones of length 1
    for _ in range(25):
        ranks.step([tiny * decaying().reshape(-1)])
    ranks.engines[0].scheme = PowerSGD(rank=new_rank)
    arrived = ranks.step([tiny * decaying().reshape(-1)])[0].view(40, 30) / tiny
    # The old leading directions are there at once.
    kept = min(old_rank, new_rank)
    values = [torch.linalg.svdvals(matrix)[:kept] for matrix in (arrived, decaying())]
    torch.testing.assert_close(*values, atol=0, rtol=1e-5)
    assert ranks.engines[0].memory.get(KEY, "w").shape == (new_rank, 30)


def test_batched_begins_anew_in_another_bucket() -> None:
    shapes = {"a": (40, 30), "b": (50, 50)}
    ranks = Simulation(BatchedPowerSGD(rank=2), shapes, world_size=1)
    layout = ranks.layout
    ranks.step([normal(3700)], buckets=[layout.pick([0]), layout.pick([1])])
    assert ranks.step([normal(3700)])[0].isfinite().all()
    values = [value for key, _, value in ranks.engines[0].memory.items() if key == BATCHED_KEY]
    assert (2, 61) in [tuple(value.shape) for value in values]
