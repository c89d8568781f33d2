"""Recorded gradients: written by parameter, read on all ranks, replayed through schemes."""

from __future__ import annotations

import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from commhooks import ErrorFeedback, Simulation, make
from commhooks.core import Layout
from commhooks.research.budget import allocate
from commhooks.research.trace import Trace, replay
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
    for given, theirs in zip(grads[2], recorded, strict=True):
        assert torch.equal(given, theirs)
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
