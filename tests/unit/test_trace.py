"""Recorded gradients, replayed through schemes, and the four figures of their errors."""

from __future__ import annotations

import math
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from commhooks import ErrorFeedback, Simulation, make
from commhooks.core import Layout
from commhooks.research._error_figures import ErrorFigures, SecondMoment, error_figures
from commhooks.research.budget import allocate
from commhooks.research.trace import Trace, bits_per_entry, measure, replay, simulation_of, steps_of
from commhooks.wrappers._traced import Traced

SHAPES = {"weight": (40, 30), "bias": (40,)}
BUCKETS = [Layout(["bias"], [(40,)]), Layout(["weight"], [(40, 30)])]


def record(folder: Path, steps: int = 7) -> list[list[torch.Tensor]]:
    """Each step's gradients of three ranks, in the order of the buckets."""
    traced = Traced(make("bf16"), str(folder), every=2, steps=3)
    ranks = Simulation(traced, SHAPES, world_size=3)
    written = []
    for step in range(steps):
        seeds = [torch.Generator().manual_seed(10 * step + rank) for rank in range(3)]
        grads = [torch.randn(1240, generator=seeded) for seeded in seeds]
        ranks.step(grads, buckets=BUCKETS)
        written.append(grads)
    return written


def test_a_record_inside_feedback_has_no_residual(tmp_path: Path) -> None:
    traced = Traced(make("topk", error_feedback=False), str(tmp_path), every=1)
    ranks = Simulation(ErrorFeedback(traced), {"p": (1000,)}, world_size=1)
    for step in range(2):
        grad = torch.randn(1000, generator=torch.Generator().manual_seed(step))
        ranks.step([grad])
        (path,) = tmp_path.glob(f"step{step:07}_*")
        assert torch.equal(load_file(path)["p"], grad)


def test_local_gradients_are_written_by_parameter(tmp_path: Path) -> None:
    grads = record(tmp_path)
    assert len(list(tmp_path.iterdir())) == 3 * 3 * 2  # steps, ranks, buckets
    trace = Trace(tmp_path)
    assert (trace.steps, trace.world_size) == ([0, 2, 4], 3)
    layout, recorded = trace.gradients(2)
    assert layout.names == ("bias", "weight")
    for given, read in zip(grads[2], recorded, strict=True):
        assert torch.equal(given, read)
    (file, *_) = tmp_path.glob("step0000004_rank1_*")
    assert set(load_file(file)) < set(SHAPES)


def test_replay_is_what_training_would_have_seen(tmp_path: Path) -> None:
    record(tmp_path)
    exact = replay(Trace(tmp_path), "none")
    figures = ["error", "median", "worst", "adam", "noise"]
    assert list(exact.columns) == ["step", "bits", *figures, "cosine", "residual"]
    # Rounding, which entries that are nearly zero in the first step make larger in Adam's metric.
    assert (exact[figures].drop(columns="adam") < 1e-12).all(axis=None)
    assert (exact.adam < 1e-9).all()
    assert exact.step.tolist() == [0, 2, 4]
    assert exact.bits.tolist() == [32] * 3
    signs = replay(Trace(tmp_path), "onebit", block=256)
    assert (signs.bits < 2).all()
    assert (signs.error > 0.1).all()
    assert signs.residual.iloc[-1] > signs.residual.iloc[0] > 0
    assert (signs.worst > signs["median"]).all()  # of two tensors
    assert (replay(Trace(tmp_path), "int8").cosine > 0.999).all()


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no file of recorded gradients"):
        Trace(tmp_path)
    record(tmp_path)
    for path in tmp_path.glob("step0000002_rank1_*"):
        path.unlink()
    with pytest.raises(ValueError, match="rank 1 has no step 2"):
        Trace(tmp_path)


@pytest.mark.parametrize("scheme", ["none", "int8"])
def test_simulated_ranks_keep_no_gradients_of_past_steps(scheme: str) -> None:
    ranks = Simulation(scheme, SHAPES, world_size=2, error_feedback=False)
    means = ranks.step([torch.ones(1240)] * 2)
    kept = [weakref.ref(mean.untyped_storage()) for mean in means]
    del means
    assert [storage() for storage in kept] == [None, None]


def test_the_first_ranks_of_a_trace_are_a_trace(tmp_path: Path) -> None:
    grads = record(tmp_path)
    trace = Trace(tmp_path, ranks=2)
    _, recorded = trace.gradients(4)
    assert trace.world_size == len(recorded) == 2
    assert all(map(torch.equal, recorded, grads[4][:2]))
    assert len(replay(trace, "int8")) == 3
    for ranks in (0, 4):
        with pytest.raises(ValueError, match=f"it is 1 to 3, got {ranks}"):
            Trace(tmp_path, ranks=ranks)


def test_half_a_file_is_no_gradient(tmp_path: Path) -> None:
    record(tmp_path)
    (tmp_path / "step0000006_rank0_00000000.part").write_bytes(b"half")
    assert Trace(tmp_path).steps == [0, 2, 4]


@pytest.mark.parametrize("name", ["every", "steps"])
def test_settings_are_checked(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        Traced(make("none"), "folder", **{name: 0})


def test_recording_begins_where_it_is_switched_on(tmp_path: Path) -> None:
    ranks = Simulation("none", SHAPES, world_size=2)
    grads = [torch.ones(1240)] * 2
    for _ in range(11):
        ranks.step(grads)
    for engine in ranks.engines:
        engine.scheme = Traced(make("none"), str(tmp_path), every=4, steps=2)
    for _ in range(15):
        ranks.step(grads)
    assert Trace(tmp_path).steps == [12, 16]


def test_a_step_of_zeros_has_no_residual(tmp_path: Path) -> None:
    ranks = Simulation(Traced(make("bf16"), str(tmp_path), every=1, steps=1), SHAPES, world_size=2)
    ranks.step([torch.zeros(1240)] * 2, buckets=BUCKETS)
    table = replay(Trace(tmp_path), "onebit", block=256)
    assert table[["error", "residual"]].iloc[0].tolist() == [0.0, 0.0]


def test_a_budget_counts_a_scheme_after_its_dense_steps() -> None:
    grads = [torch.randn(4096, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    steps = [(Layout(["w"], [(64, 64)]), grads)]
    plain = allocate(steps, [make("powersgd", rank=1)], bits=64.0)
    later = allocate(steps, [make("powersgd", rank=1, start_step=9, coalesce=True)], bits=64.0)
    assert (later.bits, later.error) == (plain.bits, plain.error)


PAIR = Layout(["large", "small"], [(2,), (2,)])


def figures(mean: list[float], exact: list[float], layout: Layout = PAIR) -> ErrorFigures:
    """The figures of a first step."""
    true = torch.tensor(exact)
    return error_figures(torch.tensor(mean), true, layout, SecondMoment().updated(true))


def test_a_small_tensor_drowns_in_the_whole_and_not_in_the_figures() -> None:
    # Errors (1, 0) of (100, 0) and (2, 0) of (2, 1): 1e-4 and 4/5 alone, 5/10005 together.
    measured = figures([101.0, 0.0, 4.0, 1.0], [100.0, 0.0, 2.0, 1.0])
    assert measured.error == pytest.approx(5 / 10005)
    assert measured.worst == pytest.approx(0.8)
    assert measured.median == pytest.approx((1e-4 + 0.8) / 2)
    assert measured.noise == 0
    # In the first step v = m^2: the entries' relative errors, over the number of nonzero entries.
    assert measured.adam == pytest.approx((0.01**2 + 1 + 0) / 3, rel=1e-6)


def test_the_median_of_three_is_that_of_the_one_in_the_middle() -> None:
    layout = Layout(["a", "b", "c"], [(1,)] * 3)
    measured = figures([1.1, 12.0, 3.0], [1.0, 10.0, 2.0], layout)
    assert (measured.median, measured.worst) == (pytest.approx(0.04), pytest.approx(0.25))


def test_a_tensor_of_zeros_is_left_out_and_counted_if_it_gets_noise() -> None:
    quiet = figures([1.5, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0])
    noisy = figures([1.5, 0.0, 1e-3, 0.0], [1.0, 0.0, 0.0, 0.0])
    assert (quiet.median, quiet.worst, quiet.noise) == (0.25, 0.25, 0)
    assert (noisy.median, noisy.worst, noisy.noise) == (0.25, 0.25, 1)
    # Where v = 0 the denominator is 1e-8: noise of 1e-3 counts as (1e-3 / 1e-8)^2.
    assert quiet.adam == pytest.approx(0.25)
    assert noisy.adam == pytest.approx(1e10, rel=1e-6)


def test_a_tensor_of_rounding_counts_as_zero() -> None:
    # The root mean square of the whole is 1/2, of the second 3.5e-7: less than 2^-20 of it.
    tiny = figures([1.5, 0.0, 1e-3, 0.0], [1.0, 0.0, 5e-7, 0.0])
    assert (tiny.median, tiny.worst, tiny.noise) == (0.25, 0.25, 1)
    exact = figures([1.5, 0.0, 5e-7, 0.0], [1.0, 0.0, 5e-7, 0.0])
    assert (exact.worst, exact.noise) == (0.25, 0)
    small = figures([1.5, 0.0, 3e-5, 0.0], [1.0, 0.0, 1e-5, 0.0])
    assert (small.worst, small.noise) == (pytest.approx(4.0), 0)


def test_a_step_of_zeros_has_figures() -> None:
    assert figures([0.0] * 4, [0.0] * 4) == (0.0, 0.0, 0.0, 0.0, 0)


def test_what_is_lost_is_not_a_number_or_infinite() -> None:
    lost = figures([math.nan, 0.0, 2.0, 1.0], [100.0, 0.0, 2.0, 1.0])
    assert all(math.isnan(figure) for figure in lost[:4])
    endless = figures([math.inf, 0.0, 2.0, 1.0], [100.0, 0.0, 2.0, 1.0])
    assert endless[:4] == (math.inf,) * 4


def test_other_numbers_of_entries_raise() -> None:
    with pytest.raises(ValueError, match="4 entries each, got 3, 4 and 4"):
        error_figures(torch.ones(3), torch.ones(4), PAIR, torch.ones(4))


class Drawn:
    """Gradients of 3 ranks that shrink over 5 steps; entry 3 is zero in all of them."""

    name, steps, world_size = "drawn", (0, 1, 2, 3, 4), 3

    def gradients(self, step: int) -> tuple[Layout, list[torch.Tensor]]:
        generator = torch.Generator().manual_seed(step)
        grads = [torch.randn(4, generator=generator) / (step + 1) for _ in range(3)]
        for grad in grads:
            grad[3] = 0
        return PAIR, grads


def test_the_second_moment_is_that_of_torchs_adam() -> None:
    parameter = torch.nn.Parameter(torch.zeros(4, dtype=torch.float64))
    adam = torch.optim.Adam([parameter], betas=(0.9, 0.999))
    for count, step in enumerate(steps_of(Drawn()), start=1):
        _, grads = Drawn().gradients(step.number)
        exact = sum(grad.double() for grad in grads) / 3
        parameter.grad = exact
        adam.step()
        v = adam.state[parameter]["exp_avg_sq"] / (1 - 0.999**count)
        torch.testing.assert_close(step.moment, v, rtol=1e-12, atol=0)
        torch.testing.assert_close(step.exact, exact)
        # And the figure is what Adam divides by, entry by entry.
        mean = exact + torch.tensor([0.1, 0.0, -0.2, 0.0], dtype=torch.float64)
        pairs = zip(exact.tolist(), v.tolist(), strict=True)
        divided = [(x / (math.sqrt(y) + 1e-8)) ** 2 for x, y in pairs]
        wrong = [(0.1 / (math.sqrt(v[0]) + 1e-8)) ** 2, (0.2 / (math.sqrt(v[2]) + 1e-8)) ** 2]
        measured = error_figures(mean, step.exact, PAIR, step.moment)
        assert measured.adam == pytest.approx(sum(wrong) / sum(divided), rel=1e-9)


def test_the_last_steps_have_the_moment_of_all() -> None:
    every, last = list(steps_of(Drawn())), list(steps_of(Drawn(), 2))
    assert [step.number for step in last] == [3, 4]
    assert all(torch.equal(a.moment, b.moment) for a, b in zip(every[3:], last, strict=True))
    assert len(list(steps_of(Drawn(), 9))) == 5


def test_bits_count_scales_and_padding() -> None:
    # Two ranks, two phases: each rank sends its half twice. int8 has a float32 scale per block.
    class Ones:
        name, steps, world_size = "ones", (0,), 2

        def gradients(self, step: int) -> tuple[Layout, list[torch.Tensor]]:
            return Layout(["w"], [(4096,)]), [torch.ones(4096)] * 2

    (step,) = steps_of(Ones())
    ranks = simulation_of(step, "int8", block=256)
    bits, measured, _ = measure(ranks, step)
    assert bits == 8 + 32 / 256
    assert bits == bits_per_entry(ranks, 4096)
    assert measured.error < 1e-4
