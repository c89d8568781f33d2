"""PowerSGD on simulated ranks, against the mathematics and against a naive implementation."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from commhooks.core._bucket import Bucket, Result
from commhooks.core._layout import Layout
from commhooks.core._memory import Memory
from commhooks.core._scheme import Scheme, slot_error
from commhooks.kernels import use_kernels
from commhooks.schemes.acpsgd import ACPSGD
from commhooks.schemes.batched_powersgd import KEY as BATCHED_KEY
from commhooks.schemes.batched_powersgd import BatchedPowerSGD
from commhooks.schemes.powersgd import KEY, PowerSGD, payload_numel
from commhooks.wrappers._cast import Cast
from commhooks.wrappers._feedback import ErrorFeedback
from ddp_core import simulate
from tests.shapes import MODELS, lstm, resnet18_cifar

# Entries: dense; both rounds for rank 1, 2, 4 by the paper; and for rank 1, 2, 4, 8, 32 by torch's
# hook, which leaves matrices alone that would shrink to less than half.
ENTRIES: dict[str, tuple[int, tuple[int, ...], tuple[int, ...]]] = {
    "ResNet-18 (CIFAR-10)": (
        11173962,
        (45935, 82260, 154910),
        (45935, 82260, 154910, 301154, 1226826),
    ),
    "ResNet-50": (25557032, (136611, 219102, 384084), (136611, 219102, 384084, 714048, 2782504)),
    "ResNet-101": (44549160, (275875, 445406, 784468), (275875, 445406, 784468, 1462592, 5620008)),
    "VGG-16": (138357544, (93547, 173678, 333940), (93547, 173678, 333940, 654464, 2592808)),
    "VGG-19": (143667240, (107627, 200558, 386420), (107627, 200558, 386420, 758144, 3003688)),
    "VGG-16-BN (CIFAR-10)": (
        14728266,
        (50863, 89044, 165406),
        (50863, 89044, 165406, 319074, 1238090),
    ),
    "LSTM 3x650": (28949319, (93488, 142507, 240545), (93488, 142507, 240545, 436621, 1613077)),
    "BERT-base": (109482240, (322876, 523640, 923628), (323642, 523636, 923624, 1723600, 6523456)),
    "BERT-large": (
        335141888,
        (801084, 1279608, 2234604),
        (802106, 1279604, 2234600, 4144592, 15604544),
    ),
    "GPT-2": (124439808, (321617, 521890, 922436), (321617, 521890, 922436, 1723528, 6530080)),
    "GPT-2 medium": (
        354823168,
        (768081, 1214626, 2107716),
        (768081, 1214626, 2107716, 3893896, 14610976),
    ),
    "GPT-2 XL": (
        1557611200,
        (2284881, 3568162, 6134724),
        (2284881, 3568162, 6134724, 11267848, 42066592),
    ),
    "Llama-3.2-1B": (
        1235814400,
        (902400, 1737216, 3406848),
        (902400, 1737216, 3406848, 6746112, 26781696),
    ),
    "Llama-3-8B": (
        8030261248,
        (3152384, 6038528, 11810816),
        (3152384, 6038528, 11810816, 23355392, 92622848),
    ),
}

BUCKET = [(30, 20), (30,), (8, 5, 3, 3), (30, 20), (7,), (30, 20), (3, 2), ()]


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def low_rank(rows: int, columns: int, rank: int, seed: int = 0) -> Tensor:
    return normal(rows, rank, seed=seed) @ normal(rank, columns, seed=seed + 1000)


class Ranks:
    """Simulated ranks with a memory each, over one bucket."""

    def __init__(self, scheme: Scheme, shapes: Sequence[Sequence[int]], world_size: int = 1):
        self.scheme, self.count, self.steps = scheme, 0, world_size
        self.layout = Layout([f"p{i}" for i in range(len(shapes))], shapes)
        self.memories = [Memory() for _ in range(world_size)]
        self.payloads: list[int] = []

    def step(
        self,
        grads: Sequence[Tensor],
        *,
        asks_unsent: bool = True,
        dtype: torch.dtype | None = None,
        alias: bool = False,
    ) -> list[Result]:
        """One exchange; memories are committed by the scheme's own verdict."""
        self.payloads = []
        exchanges = []
        for rank, (grad, memory) in enumerate(zip(grads, self.memories, strict=True)):
            grad = grad.clone()
            wide = torch.promote_types(grad.dtype, torch.float32)
            bucket = Bucket(
                grad,
                self.layout,
                output=grad if alias else torch.full_like(grad, 7.0, dtype=dtype),
                unsent=torch.empty_like(grad, dtype=wide) if asks_unsent else None,
                memory=memory,
                step=self.count,
                rank=rank,
                world_size=len(grads),
            )
            exchanges.append(self._counted(self.scheme.exchange(bucket), rank))
        self.count += 1
        results = simulate(exchanges)
        for memory, result in zip(self.memories, results, strict=True):
            memory.commit(torch.tensor(True) if result.finite is None else result.finite)
        return results

    def _counted(self, exchange, rank):  # type: ignore[no-untyped-def]
        answer = None
        while True:
            try:
                request = next(exchange) if answer is None else exchange.send(answer)
            except StopIteration as stop:
                return stop.value
            if rank == 0:
                self.payloads.append(request.payload_nbytes)
            answer = yield request


def one(scheme: Scheme, *matrices: Tensor, **options: bool) -> Result:
    """A single exchange of one rank."""
    ranks = Ranks(scheme, [matrix.shape for matrix in matrices])
    return ranks.step([torch.cat([matrix.reshape(-1) for matrix in matrices])], **options)[0]


SCHEMES = [PowerSGD(rank=2, min_compression_rate=1), BatchedPowerSGD(rank=2)]
both = pytest.mark.parametrize("scheme", SCHEMES, ids=["layerwise", "batched"])


# ---- settings


@pytest.mark.parametrize("rank", [0, -1, 1.5, True, "4", None])
@pytest.mark.parametrize("scheme", [PowerSGD, BatchedPowerSGD])
def test_rank_is_checked(scheme: type[PowerSGD], rank: object) -> None:
    with pytest.raises(ValueError, match=r"\(rank=\.\.\.\) is a whole number"):
        scheme(rank=rank)  # type: ignore[arg-type]


@pytest.mark.parametrize("rate", [-1, math.nan, math.inf, True, "2"])
def test_min_compression_rate_is_checked(rate: float) -> None:
    with pytest.raises(ValueError, match="min_compression_rate"):
        PowerSGD(min_compression_rate=rate)


@pytest.mark.parametrize("name", ["warm_start"])
def test_flags_are_checked(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        PowerSGD(**{name: 1})  # type: ignore[arg-type]


def test_stateful_only_by_warm_start() -> None:
    assert PowerSGD().keeps
    assert BatchedPowerSGD().keeps
    assert not PowerSGD(warm_start=False).keeps
    assert not BatchedPowerSGD(warm_start=False).keeps


# ---- bytes


@pytest.mark.parametrize("model", MODELS)
def test_entries_of_the_tables(model: str) -> None:
    shapes, (dense, paper, hook) = MODELS[model], ENTRIES[model]
    assert sum(math.prod(shape) for shape in shapes) == dense
    assert tuple(payload_numel(shapes, rank, 0) for rank in (1, 2, 4)) == paper
    assert tuple(payload_numel(shapes, rank, 2) for rank in (1, 2, 4, 8, 32)) == hook


@pytest.mark.parametrize(
    ("shapes", "ratios"),
    [(resnet18_cifar(), (243.3, 135.8, 72.1)), (lstm(), (309.7, 203.1, 120.3))],
    ids=["resnet18", "lstm"],
)
def test_ratios_of_the_paper(
    shapes: list[tuple[int, ...]], ratios: tuple[float, float, float]
) -> None:
    dense = sum(math.prod(shape) for shape in shapes)
    for rank, ratio in zip((1, 2, 4), ratios, strict=True):
        assert round(dense / payload_numel(shapes, rank), 1) == ratio


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_an_exchange_sends_the_bytes_of_the_table(rank: int) -> None:
    shapes = resnet18_cifar()
    ranks = Ranks(PowerSGD(rank), shapes)
    ranks.step([torch.ones(ranks.layout.numel)])
    assert len(ranks.payloads) == 2
    assert sum(ranks.payloads) == 4 * ENTRIES["ResNet-18 (CIFAR-10)"][2][(1, 2, 4).index(rank)]


@pytest.mark.parametrize("rate", [0, 0.5, 1, 2, 10])
@pytest.mark.parametrize("rank", [1, 3, 100])
def test_an_exchange_sends_payload_numel(rank: int, rate: float) -> None:
    ranks = Ranks(PowerSGD(rank, rate), BUCKET)
    ranks.step([normal(ranks.layout.numel)])
    assert sum(ranks.payloads) == 4 * payload_numel(BUCKET, rank, rate)


@pytest.mark.parametrize("numel", [100, 101, 1000, 1024])
def test_batched_sends_two_sides(numel: int) -> None:
    ranks = Ranks(BatchedPowerSGD(rank=2), [(numel,)])
    ranks.step([normal(numel)])
    side = math.ceil(math.sqrt(numel))
    assert ranks.payloads == [4 * 2 * side, 4 * 2 * side]


# ---- mathematics


def naive_step(grads: list[Tensor], q: Tensor, rank: int) -> tuple[Tensor, list[Tensor], Tensor]:
    """Mean, shares and new Q (m x r) of one matrix by the formulas of the paper, in float64."""
    q = q / q.norm(dim=0)
    p = torch.zeros(grads[0].shape[0], rank, dtype=torch.float64)
    for grad in grads:
        p += grad @ q / len(grads)
    for column in range(rank):
        for earlier in range(column):
            p[:, column] -= (p[:, earlier] @ p[:, column]) * p[:, earlier]
        p[:, column] /= p[:, column].norm()
    factors = [grad.T @ p for grad in grads]
    new = sum(factors[1:], factors[0]) / len(grads)
    return p @ new.T, [p @ factor.T for factor in factors], new


@pytest.mark.parametrize("rank", [1, 3])
def test_steps_equal_a_naive_implementation(rank: int) -> None:
    scheme = PowerSGD(rank, min_compression_rate=1)
    ranks = Ranks(scheme, BUCKET, world_size=3)
    layout = ranks.layout
    compressed = [0, 2, 3, 5] if rank == 3 else [0, 2, 3, 5, 6]
    bucket = Bucket(torch.empty(0), layout)
    q = {}
    for i in compressed:
        columns = math.prod(BUCKET[i][1:])
        drawn = torch.randn(rank, columns, generator=bucket.generator(f"p{i}/q", step=0))
        q[i] = drawn.double().T
    for step in range(3):
        grads = [normal(layout.numel, seed=10 * step + rank) for rank in range(3)]
        results = ranks.step(grads)
        for i, shape in enumerate(BUCKET):
            rows = shape[0] if shape else 1
            local = [layout.views(grad)[i].double().reshape(rows, -1) for grad in grads]
            mean, shares = sum(local[1:], local[0]) / 3, local
            if i in compressed:
                mean, shares, q[i] = naive_step(local, q[i], rank)
            for result, grad, share in zip(results, local, shares, strict=True):
                assert result.unsent is not None
                got = layout.views(result.mean)[i].reshape(rows, -1)
                torch.testing.assert_close(got.double(), mean, atol=2e-5, rtol=1e-5)
                rest = layout.views(result.unsent)[i].reshape(rows, -1)
                torch.testing.assert_close(rest.double(), grad - share, atol=2e-5, rtol=1e-5)


def test_exact_rank_is_recovered_in_one_step() -> None:
    # The sum over ranks has rank 2 + 2 = 4; conv weights count as matrices of shape[0] rows.
    shapes = [(40, 30), (16, 9, 3, 3), (40, 30)]
    ranks = Ranks(PowerSGD(rank=4), shapes, world_size=2)
    grads = [
        torch.cat(
            [
                low_rank(s[0], math.prod(s[1:]), 2, seed=7 * r + i).reshape(-1)
                for i, s in enumerate(shapes)
            ]
        )
        for r in range(2)
    ]
    mean = ranks.step(grads)[0].mean
    torch.testing.assert_close(mean, (grads[0] + grads[1]) / 2, atol=2e-5, rtol=1e-5)


def test_batched_recovers_a_square_of_its_rank() -> None:
    square = low_rank(33, 33, 2)
    result = one(BatchedPowerSGD(rank=2), square)
    torch.testing.assert_close(result.mean, square.reshape(-1), atol=2e-5, rtol=1e-5)


@both
@pytest.mark.parametrize("world_size", [2, 3])
def test_compressing_over_ranks_equals_compressing_the_mean(
    scheme: Scheme, world_size: int
) -> None:
    many, single = Ranks(scheme, BUCKET, world_size), Ranks(scheme, BUCKET)
    for step in range(3):
        grads = [normal(many.layout.numel, seed=5 * step + r) for r in range(world_size)]
        mean = torch.stack(grads).mean(0)
        got, expected = many.step(grads)[0].mean, single.step([mean])[0].mean
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


@both
def test_all_ranks_get_equal_bits(scheme: Scheme) -> None:
    ranks = Ranks(scheme, BUCKET, world_size=4)
    for step in range(2):
        results = ranks.step([normal(ranks.layout.numel, seed=4 * step + r) for r in range(4)])
        assert all(torch.equal(result.mean, results[0].mean) for result in results)


@both
def test_mean_of_shares_is_the_mean(scheme: Scheme) -> None:
    ranks = Ranks(scheme, BUCKET, world_size=3)
    grads = [normal(ranks.layout.numel, seed=r) for r in range(3)]
    results = ranks.step(grads)
    sent = [g - r.unsent for g, r in zip(grads, results, strict=True) if r.unsent is not None]
    torch.testing.assert_close(sum(sent[1:], sent[0]) / 3, results[0].mean, atol=1e-5, rtol=1e-5)


@both
def test_error_is_orthogonal_to_what_was_sent(scheme: Scheme) -> None:
    ranks = Ranks(scheme, [(35, 35)])  # a full square: what padding would take is not sent
    grad = normal(ranks.layout.numel)
    result = ranks.step([grad])[0]
    assert result.unsent is not None
    parts = result.mean.double().square().sum() + result.unsent.double().square().sum()
    torch.testing.assert_close(parts, grad.double().square().sum(), atol=0, rtol=1e-5)


def test_warm_start_reaches_the_best_approximation() -> None:
    values = torch.tensor([9.0, 6.0, 4.0, 2.0, 1.0, 0.5])
    left, right = (torch.linalg.qr(normal(n, 6, seed=n))[0] for n in (40, 30))
    matrix = left * values @ right.T
    best = left[:, :3] * values[:3] @ right[:, :3].T
    ranks = Ranks(PowerSGD(rank=3), [(40, 30)])
    for _ in range(30):  # the error shrinks by (2 / 4)^2 a step
        mean = ranks.step([matrix.reshape(-1)])[0].mean
    torch.testing.assert_close(mean.view(40, 30), best, atol=1e-5, rtol=0)


def test_without_warm_start_every_step_draws_anew() -> None:
    ranks = Ranks(PowerSGD(rank=1, warm_start=False), [(40, 30)])
    grad = normal(1200)
    first, second = (ranks.step([grad])[0].mean for _ in range(2))
    assert not torch.allclose(first, second)
    assert not ranks.memories[0].has(KEY)


def test_ill_conditioned_gradient_is_recovered() -> None:
    left, right = (torch.linalg.qr(normal(n, 4, seed=n))[0] for n in (60, 50))
    matrix = left * torch.tensor([1.0, 1e-1, 1e-3, 1e-5]) @ right.T
    ranks = Ranks(PowerSGD(rank=4), [(60, 50)])
    for _ in range(4):
        mean = ranks.step([matrix.reshape(-1)])[0].mean
        torch.testing.assert_close(mean.view(60, 50), matrix, atol=1e-6, rtol=0)


# ---- shapes and layouts


@pytest.mark.parametrize(
    "shapes",
    [
        [],
        [(0,)],
        [(1,)],
        [()],
        [(1, 1)],
        [(1, 40)],
        [(40, 1)],
        [(31, 33)],
        [(5, 0)],
        [(3, 1, 5, 7)],
    ],
    ids=str,
)
@pytest.mark.parametrize("rate", [0, 2])
@pytest.mark.parametrize("asks_unsent", [True, False])
def test_odd_buckets(shapes: list[tuple[int, ...]], rate: float, asks_unsent: bool) -> None:
    for scheme in (PowerSGD(4, rate), BatchedPowerSGD(2)):
        ranks = Ranks(scheme, shapes, world_size=2)
        grads = [normal(ranks.layout.numel, seed=r) for r in range(2)]
        for _ in range(2):
            results = ranks.step(grads, asks_unsent=asks_unsent)
        mean = (grads[0] + grads[1]) / 2
        assert results[0].mean.shape == mean.shape
        if isinstance(scheme, PowerSGD) and min((*shapes, (9, 9))[0], default=0) <= 1:
            torch.testing.assert_close(results[0].mean, mean)  # rank 1 is exact for vectors


@pytest.mark.parametrize("asks_unsent", [True, False])
def test_uncompressed_bucket_is_a_plain_all_reduce(asks_unsent: bool) -> None:
    ranks = Ranks(PowerSGD(rank=4), [(4, 4), (9,)], world_size=2)
    grads = [normal(25, seed=r) for r in range(2)]
    results = ranks.step(grads, asks_unsent=asks_unsent)
    assert ranks.payloads == [100]
    assert torch.equal(results[0].mean, grads[0] * 0.5 + grads[1] * 0.5)


@pytest.mark.parametrize("gaps", [[3] * 12, [0] * 12, [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]])
def test_kernels_change_rounding_only(gaps: list[int]) -> None:
    shapes: list[tuple[int, ...]] = []
    for gap in gaps:
        shapes += [(12, 10), (gap,)]
    grad = normal(sum(math.prod(shape) for shape in shapes))
    results = []
    for mode in ("definition", "native"):
        ranks = Ranks(PowerSGD(rank=2), shapes)
        with use_kernels(mode):
            for _ in range(2):
                result = ranks.step([grad])[0]
        results.append(result)
    torch.testing.assert_close(results[0].mean, results[1].mean, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(results[0].unsent, results[1].unsent, atol=1e-5, rtol=1e-5)


def test_other_buckets_draw_the_same() -> None:
    scheme = PowerSGD(rank=2)
    whole = Ranks(scheme, [(30, 20), (5,), (25, 20)])
    grad = normal(whole.layout.numel)
    mean = whole.step([grad])[0].mean
    alone = Ranks(scheme, [(30, 20)])
    torch.testing.assert_close(alone.step([grad[:600]])[0].mean, mean[:600], atol=1e-5, rtol=1e-5)


@both
def test_gradient_inside_a_larger_storage(scheme: Scheme) -> None:
    ranks = Ranks(scheme, BUCKET)
    grad = normal(ranks.layout.numel)
    expected = ranks.step([grad])[0].mean
    storage = torch.zeros(ranks.layout.numel + 17)
    part = storage[5:-12].copy_(grad)
    (result,) = simulate([scheme.exchange(Bucket(part, ranks.layout))])
    torch.testing.assert_close(result.mean, expected, atol=1e-6, rtol=1e-5)
    assert not storage[:5].any()
    assert not storage[-12:].any()


# ---- dtypes and memory of the caller


@both
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("asks_unsent", [True, False])
def test_mean_has_the_dtype_of_the_gradient(
    scheme: Scheme, dtype: torch.dtype, asks_unsent: bool
) -> None:
    ranks, wide = Ranks(scheme, BUCKET), Ranks(scheme, BUCKET)
    grad = normal(ranks.layout.numel).to(dtype)
    result = ranks.step([grad], asks_unsent=asks_unsent)[0]
    expected = wide.step([grad.float()])[0].mean
    assert result.mean.dtype == dtype
    tolerance = {torch.float64: 1e-5}.get(dtype, torch.finfo(dtype).eps)
    torch.testing.assert_close(result.mean.float(), expected, atol=tolerance, rtol=tolerance)


@both
def test_float64_is_exact_to_float64(scheme: Scheme) -> None:
    ranks = Ranks(scheme, [(33, 33)])
    grad = (normal(33, 2, dtype=torch.float64) @ normal(2, 33, dtype=torch.float64)).reshape(-1)
    torch.testing.assert_close(ranks.step([grad])[0].mean, grad, atol=1e-12, rtol=1e-12)


@both
def test_output_may_be_the_gradient(scheme: Scheme) -> None:
    apart, same = Ranks(scheme, BUCKET), Ranks(scheme, BUCKET)
    grad = normal(apart.layout.numel)
    for _ in range(2):
        expected = apart.step([grad])[0].mean
        got = same.step([grad], asks_unsent=False, alias=True)[0].mean
    assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@both
def test_cast_keeps_applied_plus_residual(scheme: Scheme, dtype: torch.dtype) -> None:
    ranks = Ranks(Cast(scheme, dtype), BUCKET, world_size=2)
    grads = [normal(ranks.layout.numel, seed=r) for r in range(2)]
    results = ranks.step(grads)
    rest = sum(r.unsent for r in results if r.unsent is not None)
    total = results[0].mean * 2 + rest
    # What one rank rounds it keeps; only the sum itself rounds, once, on factors of norm ~ 10.
    atol = 40 * torch.finfo(dtype).eps
    torch.testing.assert_close(total, grads[0] + grads[1], atol=atol, rtol=0)
    assert sum(ranks.payloads) % 2 == 0


@both
def test_error_feedback_applies_the_sum_of_gradients(scheme: Scheme) -> None:
    ranks = Ranks(ErrorFeedback(scheme), BUCKET, world_size=2)
    total = torch.zeros(ranks.layout.numel)
    applied = torch.zeros(ranks.layout.numel)
    for step in range(6):
        grads = [normal(ranks.layout.numel, seed=2 * step + r) for r in range(2)]
        total += (grads[0] + grads[1]) / 2
        applied += ranks.step(grads, asks_unsent=False)[0].mean
    residual = torch.zeros_like(total)
    for memory in ranks.memories:
        residual += memory.read("residual", ranks.layout, device=total.device) / 2
    torch.testing.assert_close(applied + residual, total, atol=1e-4, rtol=1e-4)


# ---- zero, rank-deficient and non-finite gradients


@both
def test_zero_gradient_arrives_as_zero_and_does_no_harm(scheme: Scheme) -> None:
    ranks = Ranks(scheme, [(33, 33)])
    zero, grad = torch.zeros(33 * 33), low_rank(33, 33, 2).reshape(-1)
    for _ in range(2):
        assert torch.equal(ranks.step([zero])[0].mean, zero)
    torch.testing.assert_close(ranks.step([grad])[0].mean, grad, atol=3e-5, rtol=1e-5)


@both
def test_rank_deficient_gradient_leaves_a_live_factor(scheme: Scheme) -> None:
    ranks = Ranks(scheme, [(33, 33)])
    first, second = low_rank(33, 33, 1).reshape(-1), low_rank(33, 33, 2, seed=5).reshape(-1)
    for _ in range(3):
        torch.testing.assert_close(ranks.step([first])[0].mean, first, atol=2e-5, rtol=1e-5)
    # The row that carried rounding errors was drawn anew, so one step is enough.
    torch.testing.assert_close(ranks.step([second])[0].mean, second, atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", [0, 605, -1], ids=["matrix", "tail", "last"])
def test_non_finite_on_one_rank_poisons_all(bad: float, where: int) -> None:
    ranks = Ranks(PowerSGD(rank=2, min_compression_rate=1), BUCKET, world_size=3)
    grads = [normal(ranks.layout.numel, seed=r) for r in range(3)]
    ranks.step(grads)
    before = [
        memory.read(KEY, _q_layout(memory), device=grads[0].device).clone()
        for memory in ranks.memories
    ]
    broken = [grad.clone() for grad in grads]
    broken[1][where] = bad
    results = ranks.step(broken)
    for result, memory, old in zip(results, ranks.memories, before, strict=True):
        assert result.finite is not None
        assert not result.finite
        for view, shape in zip(ranks.layout.views(result.mean), BUCKET, strict=True):
            if math.prod(shape) > 100:
                assert view.isnan().all()
        assert not result.mean[where].isfinite()
        now = memory.read(KEY, _q_layout(memory), device=grads[0].device)
        assert torch.equal(now, old)


def _q_layout(memory: Memory) -> Layout:
    (layout,) = {place[0] for place in memory._kept._where[KEY].values()}
    return layout


@pytest.mark.parametrize("where", [0, 400, -1])
def test_batched_non_finite_poisons_the_whole_bucket(where: int) -> None:
    ranks = Ranks(BatchedPowerSGD(rank=2), BUCKET, world_size=2)
    grads = [normal(ranks.layout.numel, seed=r) for r in range(2)]
    grads[0][where] = math.inf
    for result in ranks.step(grads):
        assert result.finite is not None
        assert not result.finite
        assert result.mean.isnan().all()


@both
def test_the_step_after_a_bad_one_is_as_if_it_never_was(scheme: Scheme) -> None:
    clean, hit = (Ranks(ErrorFeedback(scheme), BUCKET, world_size=2) for _ in range(2))
    grads = [normal(clean.layout.numel, seed=r) for r in range(2)]
    for ranks in (clean, hit):
        ranks.step(grads)
    hit.step([grads[0], grads[1] * math.inf])
    for _ in range(2):
        assert torch.equal(clean.step(grads)[0].mean, hit.step(grads)[0].mean)


@both
def test_mean_that_overflows_float16_is_not_finite(scheme: Scheme) -> None:
    # Rank 1 with entries of 1e5: every factor fits in float32, the mean does not in float16.
    ranks = Ranks(scheme, [(33, 33)])
    result = ranks.step([torch.full((33 * 33,), 1e5)], dtype=torch.float16)[0]
    assert result.mean.isinf().all()
    assert result.finite is not None
    assert not result.finite


# ---- what is remembered


def test_another_rank_takes_over_the_rows_there_are() -> None:
    matrix = low_rank(40, 30, 2)
    ranks = Ranks(PowerSGD(rank=2), [(40, 30)])
    ranks.step([matrix.reshape(-1)])
    (old,) = (value.clone() for key, _, value in ranks.memories[0].items() if key == KEY)
    ranks.scheme = PowerSGD(rank=3)
    mean = ranks.step([matrix.reshape(-1)])[0].mean
    torch.testing.assert_close(mean.view(40, 30), matrix, atol=2e-5, rtol=1e-5)
    (new,) = (value for key, _, value in ranks.memories[0].items() if key == KEY)
    assert old.shape == (2, 30)
    assert new.shape == (3, 30)


@pytest.mark.parametrize(("old_rank", "new_rank"), [(3, 1), (1, 3)])
def test_rank_may_change_between_steps(old_rank: int, new_rank: int) -> None:
    ranks = Ranks(PowerSGD(rank=old_rank), [(40, 30)])
    tiny = 1e-12  # rows of the old length must not drown in new ones of length 1
    for _ in range(25):
        ranks.step([tiny * _decaying().reshape(-1)])
    ranks.scheme = PowerSGD(rank=new_rank)
    mean = ranks.step([tiny * _decaying().reshape(-1)])[0].mean.view(40, 30) / tiny
    # The old leading directions are there at once.
    kept = min(old_rank, new_rank)
    torch.testing.assert_close(
        torch.linalg.svdvals(mean)[:kept],
        torch.linalg.svdvals(_decaying())[:kept],
        atol=0,
        rtol=2e-2,
    )


def _decaying() -> Tensor:
    left, right = (torch.linalg.qr(normal(n, 6, seed=n))[0] for n in (40, 30))
    return left * 0.25 ** torch.arange(6.0) @ right.T


@both
def test_a_loaded_memory_continues_bit_for_bit(scheme: Scheme) -> None:
    on, again = (Ranks(scheme, BUCKET, world_size=2) for _ in range(2))
    grads = [[normal(on.layout.numel, seed=2 * s + r) for r in range(2)] for s in range(4)]
    for step in range(2):
        on.step(grads[step])
    for memory, fresh in zip(on.memories, again.memories, strict=True):
        values: dict[str, dict[str, Tensor]] = {}
        for key, name, value in memory.items():
            values.setdefault(key, {})[name] = value.clone()
        fresh.load(values)
    again.count = on.count
    for step in range(2, 4):
        assert torch.equal(on.step(grads[step])[0].mean, again.step(grads[step])[0].mean)


def test_memory_error() -> None:
    scheme, shape = PowerSGD(), torch.Size([8, 5, 3])
    assert slot_error(scheme, KEY, torch.zeros(2, 15), shape) is None
    assert "(rank, 15)" in str(slot_error(scheme, KEY, torch.zeros(2, 14), shape))
    assert "(rank, 15)" in str(slot_error(scheme, KEY, torch.zeros(15), shape))
    assert "matrix" in str(slot_error(scheme, KEY, torch.zeros(2, 15), torch.Size([120])))
    assert slot_error(scheme, "residual", torch.zeros(2, 15), shape) == "unknown"
    batched = BatchedPowerSGD()
    assert slot_error(batched, BATCHED_KEY, torch.zeros(1, 9), shape) is None
    assert slot_error(batched, BATCHED_KEY, torch.zeros(9), shape) is not None
    assert slot_error(batched, KEY, torch.zeros(1, 9), shape) == "unknown"


def test_batched_begins_anew_in_another_bucket() -> None:
    ranks = Ranks(BatchedPowerSGD(rank=2), [(40, 30)])
    ranks.step([normal(1200)])
    ranks.layout = Layout(["p0", "p1"], [(40, 30), (50, 50)])
    assert ranks.step([normal(3700)])[0].mean.isfinite().all()
    (value,) = (value for key, _, value in ranks.memories[0].items() if key == BATCHED_KEY)
    assert value.shape == (2, 61)


@pytest.mark.parametrize("scheme", [PowerSGD(2), ACPSGD(2)])
@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_is_written_over_only_where_the_mean_goes_there(scheme, step, dtype):
    layout = Layout(["w", "b", "v"], [(32, 24), (7,), (24, 40)])
    generator = torch.Generator().manual_seed(0)
    before = torch.randn(layout.numel, generator=generator).to(dtype)
    residual = torch.randn(layout.numel, generator=generator)
    found = []
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
        found.append((result.mean.clone(), result.unsent))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
