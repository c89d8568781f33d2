"""Twenty-nine defects found in the compression code of others, one test each: none is here."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import commhooks
from commhooks import ErrorFeedback, Simulation
from commhooks.classic._minmax import MinMax, MinMaxPerChannel
from commhooks.core import Layout
from commhooks.kernels import Matrices, orthonormalize, random_places, top_k
from commhooks.schemes import (
    ACPSGD,
    BatchedPowerSGD,
    Blockwise,
    PowerSGD,
    RandomK,
    TopK,
)
from commhooks.wrappers import PeriodicDense
from commhooks.wrappers import _cast as _cast
from tests.contract.cases import AVERAGING, make, named


def normal(numel: int, seed: int = 0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def mean_of(scheme: object, *grads: Tensor, **options: object) -> Tensor:
    """What each of the ranks gets, in one step."""
    shapes = {"p": tuple(grads[0].shape)}
    ranks = Simulation(scheme, shapes, world_size=len(grads), **options)
    return ranks.step(list(grads))[0]


def test_01_batched_powersgd_runs_on_a_bucket_that_is_no_square() -> None:
    assert mean_of(BatchedPowerSGD(2), normal(1003), normal(1003, 1)).shape == (1003,)


def test_02_quantised_buckets_come_back_flat_in_their_dtype() -> None:
    for scheme in (MinMax(), MinMaxPerChannel(64)):
        mean = mean_of(scheme, normal(100).half(), normal(100, 1).half())
        assert (mean.shape, mean.dtype) == ((100,), torch.float16)


def test_03_powersgd_works_on_two_buckets() -> None:
    # In one process here; between processes tests/hook/test_lanes.py.
    buckets = [Layout(["a"], [(20, 30)]), Layout(["b"], [(30, 20)])]
    ranks = Simulation(PowerSGD(1), {"a": (20, 30), "b": (30, 20)}, world_size=2)
    for step in range(3):
        means = ranks.step([normal(1200, step), normal(1200, step + 9)], buckets=buckets)
        assert torch.equal(*means)


def test_04_powersgd_resumes_before_its_first_step_and_in_other_buckets() -> None:
    one = Simulation(PowerSGD(1), {"a": (20, 30), "b": (30, 20)}, world_size=1)
    one.step([normal(1200)])
    saved: dict[str, dict[str, Tensor]] = {}
    for key, name, value in one.engines[0].memory.items():
        saved.setdefault(key, {})[name] = value.clone()
    other = Simulation(PowerSGD(1), {"a": (20, 30), "b": (30, 20)}, world_size=1)
    other.engines[0].memory.load(saved)
    other.engines[0].step = 1
    buckets = [Layout(["b"], [(30, 20)]), Layout(["a"], [(20, 30)])]
    grad = normal(1200, 5)
    swapped = other.step([torch.cat([grad[600:], grad[:600]])], buckets=buckets)[0]
    expected = one.step([grad])[0]
    torch.testing.assert_close(torch.cat([swapped[600:], swapped[:600]]), expected)


def test_05_a_zero_gradient_is_no_nan_in_powersgd() -> None:
    for scheme in (PowerSGD(2), BatchedPowerSGD(1), ACPSGD(2)):
        ranks = Simulation(ErrorFeedback(scheme), {"w": (30, 20)}, world_size=2)
        for _ in range(3):
            assert not ranks.step([torch.zeros(600)] * 2)[0].any()
        assert ranks.step([normal(600), normal(600, 1)])[0].isfinite().all()


def test_06_one_infinity_does_not_stay_in_the_memory() -> None:
    ranks = Simulation("powersgd", {"w": (30, 20)}, world_size=2)
    ranks.step([normal(600), torch.full((600,), math.inf)])
    assert ranks.step([normal(600), normal(600, 1)])[0].isfinite().all()


def test_07_fp16_divides_before_it_casts() -> None:
    mean = mean_of("fp16", torch.full((8,), 7e4), torch.zeros(8))
    assert torch.equal(mean, torch.full((8,), 35008.0))


def test_08_a_bucket_is_an_object_with_the_names_hooks_know() -> None:
    # What compiled graphs hand over instead of a GradBucket: tests/ddp/test_ddp_compile.py.
    import ddp_core

    wanted = {"buffer", "gradients", "index", "is_last", "parameters", "set_buffer"}
    assert wanted <= set(dir(ddp_core.GradBucket))


def test_09_both_signs_survive_packing() -> None:
    x = normal(1000)
    mean = mean_of(Blockwise("sign", 256), x)
    assert torch.equal(mean < 0, x < 0)


def test_10_large_negative_entries_count_as_large() -> None:
    x = -normal(1000).abs()
    mean = mean_of(TopK(0.1), x)
    assert torch.equal(mean.nonzero().flatten(), x.abs().topk(100).indices.sort().values)


def test_11_random_places_are_all_different_and_leave_torch_s_generator_alone() -> None:
    places = random_places(1000, 300, 1, 2, 3)
    assert len(places.unique()) == 300
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    mean_of(RandomK(0.3), normal(1000), normal(1000, 1))
    assert torch.equal(torch.rand(1), expected)


def test_12_qsgd_of_zeros_is_zero() -> None:
    assert not mean_of("qsgd", torch.zeros(300), torch.zeros(300)).any()


def test_13_matrices_of_one_shape_have_norms_of_their_own() -> None:
    left = torch.cat([torch.full((4,), 3.0), torch.full((4,), 100.0)])
    orthonormalize(Matrices([(0, 4, 5, 1), (20, 4, 5, 1)]), left)
    torch.testing.assert_close(left, torch.full((8,), 0.5))


def test_14_the_maximum_of_negative_entries_is_not_zero_s_neighbour() -> None:
    x = -1000.0 - normal(512).abs()
    assert ((mean_of(MinMaxPerChannel(128), x) - x).abs() < 4.0).all()


def test_15_a_ramp_is_rounded_not_cut_off() -> None:
    x = torch.linspace(0, 1, 4096)
    level = 1 / 127
    for scheme in (Blockwise("int8", 256), MinMax()):
        assert abs(float((mean_of(scheme, x) - x).mean())) < 0.02 * level


def test_16_nan_in_a_block_arrives() -> None:
    x = normal(512)
    x[300] = math.nan
    schemes = [Blockwise("int8", 256), Blockwise("e4m3", 256), Blockwise("sign", 256), MinMax()]
    for scheme in schemes:
        assert mean_of(scheme, x, normal(512, 1))[300].isnan()


def test_17_an_overflow_of_fp16_arrives_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_cast, "_warned_of_overflow", True)
    assert mean_of("fp16", torch.full((8,), 1e6), torch.zeros(8)).isinf().all()


def test_18_factors_are_drawn_alike_on_all_ranks() -> None:
    ranks = Simulation(ACPSGD(2), {"w": (30, 20)}, world_size=3)
    first = ranks.step([normal(600, rank) for rank in range(3)])
    assert all(torch.equal(mean, first[0]) for mean in first)
    values = [engine.memory.get("acpsgd.q", "w") for engine in ranks.engines]
    assert all(torch.equal(value, values[0]) for value in values if value is not None)


def test_19_what_happens_every_so_many_steps_is_not_counted_per_bucket() -> None:
    buckets = [Layout([name], [(300,)]) for name in "abc"]
    scheme = PeriodicDense(TopK(0.01), every=4)
    ranks = Simulation(scheme, dict.fromkeys("abc", (300,)), world_size=2)
    dense = []
    for step in range(8):
        ranks.requests.clear()
        ranks.step([normal(900, step), normal(900, step + 50)], buckets=buckets)
        dense.append([name for name, _ in ranks.requests] == ["all_reduce"] * 3)
    assert dense == [False, False, False, True] * 2


@pytest.mark.parametrize("name", ["int4", "eden", "onebit", "powersgd", "acpsgd"])
def test_20_prime_sizes_are_no_special_case(name: str) -> None:
    ranks = Simulation(name, {"w": (61, 67)}, world_size=2, error_feedback=False)
    grads = [normal(61 * 67, rank) for rank in range(2)]
    mean, exact = ranks.step(grads)[0], (grads[0] + grads[1]) / 2
    assert (mean - exact).norm() < 1.6 * exact.norm()  # EDEN's variance, twice
    assert sum(ranks.wire_bytes) < 61 * 67 * 4


def test_21_places_beyond_2_to_the_24_are_exact() -> None:
    n = 2**24 + 9
    x = torch.zeros(n)
    x[-2] = 1.0
    indices, values = torch.empty(1, dtype=torch.int32), torch.empty(1)
    top_k(x, 1, indices, values)
    assert indices.tolist() == [n - 2]


@pytest.mark.parametrize("numel", [1, 31, 33, 2047, 2049])
def test_22_signs_of_any_number_of_entries(numel: int) -> None:
    # Reading past the end: tests/emulator/test_emulator.py runs kernels under address sanitizers.
    x = normal(numel) + 0.01
    mean = mean_of(Blockwise("sign", 2048, pattern="all_gather"), x)
    assert torch.equal(mean < 0, x < 0)


@named(sorted({one.name for one in AVERAGING}))
def test_23_two_ranks_get_the_mean_not_the_sum(name: str) -> None:
    x = torch.full((600,), 3.0)
    ranks = Simulation(make(name), {"w": (30, 20)}, world_size=2)
    steps = 1000 if name.startswith("random") else 300  # until most entries had a turn
    mean = sum(ranks.step([x, x])[0] for _ in range(steps)) / steps
    assert 2.0 < float(mean.mean()) < 4.0


@pytest.mark.parametrize("sampled", [False, True])
def test_24_large_entries_at_the_end_are_taken(sampled: bool) -> None:
    x = torch.arange(100_000.0)
    ranks = Simulation(ErrorFeedback(TopK(0.01, sampled)), {"p": (100_000,)}, world_size=1)
    assert ranks.step([x])[0][-1] == x[-1]


@pytest.mark.parametrize("name", ["int8", "qsgd", "terngrad", "random_k", "eden"])
def test_25_equal_seeds_draw_alike_and_others_do_not(name: str) -> None:
    grads = (normal(5000), normal(5000, 1))
    first, again, other = (
        mean_of(commhooks.make(name, error_feedback=False), *grads, seed=seed) for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_26_no_sum_of_integers_wraps_where_all_ranks_are_at_the_top() -> None:
    for name in ("int8", "e4m3", "int4", "int2"):
        scheme = Blockwise(name, 256)
        for world_size in (2, 8):
            mean = mean_of(scheme, *[torch.full((2048,), 5.0)] * world_size)
            torch.testing.assert_close(mean, torch.full((2048,), 5.0), rtol=0.2, atol=0)


def test_27_a_mean_that_is_not_zero_is_not_lost() -> None:
    x = 100.0 + normal(1000)
    for scheme in (MinMax(), MinMaxPerChannel(128), Blockwise("int8", 128)):
        assert abs(float(mean_of(scheme, x).mean()) - 100.0) < 1.0


def test_28_what_top_k_sends_is_not_zeros() -> None:
    for sampled in (False, True):
        assert mean_of(TopK(0.05, sampled), normal(1000)).count_nonzero() >= 25


@pytest.mark.parametrize("rates", [(0.1, 0.1), (0.1, 0.001)])
def test_29_residuals_are_gradients_whatever_the_learning_rate(rates: tuple[float, float]) -> None:
    # Of the same gradients the same is applied, so a learning rate that falls scales all of it.
    ranks = Simulation(ErrorFeedback(TopK(0.1)), {"p": (100,)}, world_size=1)
    grads = [normal(100, step) for step in range(2)]
    sent = [ranks.step([grad])[0] for grad in grads]
    position = -sum(rate * one for rate, one in zip(rates, sent, strict=True))
    held = ranks.memory(0)
    torch.testing.assert_close(sum(sent) + held, sum(grads))
    assert position.abs().max() <= max(rates) * sum(sent).abs().max() * 2


_CALLS: dict[str, Callable[[], None]] = {
    name: value for name, value in dict(globals()).items() if name.startswith("test_")
}


def test_there_are_twenty_nine() -> None:
    assert [int(name[5:7]) for name in _CALLS] == list(range(1, 30))
