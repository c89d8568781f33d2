"""Errors that verification measures, and schemes that break no law."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commhooks
from commhooks import PerParameter, Rule, Simulation
from commhooks.core import Bucket, Scheme
from commhooks.core._bucket import SchemeExchange
from commhooks.core._dense import Dense
from commhooks.core._layout import Layout
from commhooks.core._memory import Memory
from commhooks.verify._judge import error_bound_of
from commhooks.verify._measure import Measurement
from commhooks.wrappers import DelayedStart, PeriodicDense, Schedule
from commhooks.wrappers._base import Wrapper
from ddp_core import DistributedDataParallel as CoreDDP
from tests.contract.cases import make as make_case
from tests.contract.cases import registered
from tests.fsdp.test_fsdp2 import model_of, sharded, take_gradients
from tests.tools.harness import on_ranks
from tests.tools.training import mlp, row_of
from tests.verify.test_verify import backward


def test_a_mean_may_have_gaps() -> None:
    """A mean with strides, such as a column of a payload, is taken with or without verification."""
    rows, layout = [], Layout(["a", "b"], [(5,), (7,)])
    mean = torch.arange(24.0).view(12, 2)[:, 1]
    for each in (mean, mean.contiguous()):
        measured = Measurement(0, layout, torch.ones(12), commhooks.make("int8"))
        measured.finish(each, Memory())
        rows.append(measured.rows.view(torch.int64))
    assert torch.equal(*rows)


def _mixed() -> dict[str, Scheme]:
    """Schemes that change with the step or the parameter, with and without feedback."""
    kept, lost = commhooks.make("topk", ratio=0.1), commhooks.schemes.TopK(ratio=0.1)
    noisy, noop = commhooks.make("eden"), commhooks.make("noop")
    return {
        "to unbiased": Schedule([(0, kept), (2, noisy)]),
        "to biased": Schedule([(0, kept), (2, lost)]),
        "from local": Schedule([(0, noop), (2, commhooks.make("int8"))]),
        "local between": Schedule([(0, kept), (2, noop), (4, commhooks.make("int4"))]),
        "delayed": DelayedStart(kept, 2, before=noisy),
        "delayed, without": DelayedStart(noisy, 2, before=kept),
        "dense at times": PeriodicDense(noop, every=2),
        "unbiased vectors": PerParameter([Rule(kept, min_dim=2)], noisy),
        "biased vectors": PerParameter([Rule(kept, min_dim=2)], lost),
    }


@on_ranks(2)
def test_a_scheme_that_changes_is_judged_by_the_part_that_runs(rank: int) -> None:
    averaging = {
        "from local": [2, 3, 4, 5],
        "local between": [0, 1, 4, 5],
        "dense at times": [1, 3, 5],
    }
    for name, scheme in _mixed().items():
        torch.manual_seed(0)
        ddp = CoreDDP(mlp(16, 2), bucket_cap_mb=0.002)
        hook = commhooks.register(ddp, scheme, verify=1, error_feedback=False)
        for step in range(6):
            backward(ddp, step, rank)
        steps = sorted(set(hook.verification.report()["step"]))
        assert not hook.verification.findings, name
        assert steps == averaging.get(name, list(range(6))), name
        hook.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@on_ranks(2, ignore_warnings=("commhooks:",))
def test_no_registered_scheme_is_accused(rank: int, world_size: int, dtype: torch.dtype) -> None:
    for name in registered():
        torch.manual_seed(0)
        ddp = DistributedDataParallel(mlp(16, 2).to(dtype), bucket_cap_mb=0.002)
        hook = commhooks.register(ddp, make_case(name), verify=1)
        for step in range(4):
            torch.manual_seed(10 * step + rank)
            ddp.zero_grad()
            # One rank's gradient is much larger, another one in each step.
            size = 100.0 if rank == step % world_size else 1.0
            (ddp(torch.randn(4, 16).to(dtype)) * size).square().mean().backward()
        hook.verification.report()
        assert not hook.verification.findings, name
        assert hook.verification.steps == 4, name
        hook.close()


def _reports(
    rank: int, name: str, steps: int, wrap: Any = DistributedDataParallel, **options: Any
) -> tuple[list[str], Any, Any]:
    """Parameters, and rows of error, cosine and norm: as reported, and computed from gradients."""
    rows = {}
    ours, plain = (wrap(model_of((96, 96, 96))) for _ in range(2))
    hook = commhooks.register(ours, name, verify=1, **options)
    for step in range(steps):
        # What feedback sends late is many times the gradients once these shrink.
        size = 1.0 if step < 20 else 0.1
        for model in (ours, plain):
            torch.manual_seed(10 * step + rank)
            (model(torch.randn(4, 96)).square().mean() * size).backward()
        averages, means = take_gradients(ours), take_gradients(plain)
        for key, mean in means.items():
            rows[step, key.removeprefix("module.")] = row_of(averages[key], mean)
    frame = hook.verification.report()
    hook.close()
    columns = frame[["error", "cosine", "norm"]].to_numpy()
    exact_rows = [rows[key] for key in zip(frame["step"], frame["parameter"], strict=True)]
    return frame["parameter"].tolist(), columns, np.array(exact_rows)


@on_ranks(2)
def test_errors_of_sketches_are_near_those_of_gradients(rank: int) -> None:
    near = np.testing.assert_allclose
    for name in ("int8", "topk", "powersgd"):
        parameters, sketch, exact = _reports(rank, name, 3)
        assert len(parameters) == 3 * 4
        for parameter, reported, (error, cosine, norm) in zip(
            parameters, sketch, exact, strict=True
        ):
            # A matrix of 9,216 entries has a sketch of 127 numbers, a bias of 96 one of 61.
            rest = 4 * (2 * (127 if "weight" in parameter else 61)) ** -0.5
            near(reported[0], error, rtol=rest, atol=1e-6)
            # What the error has to do with these is small where the error is.
            near(reported[1], cosine, rtol=0, atol=rest * min(1.0, error) ** 2 + 1e-6)
            near(reported[2], norm, rtol=rest * min(1.0, error) ** 2 + 1e-6)


# Of two sketches each, of 127 numbers; pieces of half a matrix have two of 61.
@pytest.mark.parametrize(("wrap", "numbers"), [(DistributedDataParallel, 127), (sharded, 2 * 61)])
@on_ranks(2)
def test_errors_many_times_the_dense_mean_are_reported_as_well(
    rank: int, wrap: Any, numbers: int
) -> None:
    """The norm of the dense mean is then not what remains of larger, inexact numbers."""
    parameters, sketch, exact = _reports(rank, "topk", 30, wrap, ratio=0.01)
    weights = np.array(["weight" in parameter for parameter in parameters])
    assert float(exact[weights, 0].max()) > 3
    off = np.abs(sketch / exact - 1)[weights]
    assert float(off[:, [0, 2]].max()) < 4 * 2**0.5 * (2 * numbers) ** -0.5
    assert float(np.nanmax(np.abs(sketch[:, 1] - exact[:, 1]))) < 0.25
    assert float(np.nanmax(np.abs(sketch[:, 1]))) <= 1


@on_ranks(2)
def test_a_flushed_residual_is_part_of_the_dense_mean(rank: int) -> None:
    ddp = CoreDDP(nn.Linear(64, 64, bias=False))
    hook = commhooks.register(ddp, "topk", verify=1, ratio=0.01)
    for step in range(6):
        if step == 5:
            hook.switch("none")
        backward(ddp, step, rank, 64)
    row = hook.verification.report().iloc[-1]
    assert row["error"] < 1e-5
    assert row["cosine"] > 1 - 1e-5
    assert abs(row["norm"] / float(ddp.module.weight.grad.norm()) - 1) < 1e-5


@on_ranks(2, ignore_warnings=("commhooks:",))
def test_what_is_not_finite_has_no_cosine(rank: int) -> None:
    ddp = DistributedDataParallel(mlp(16, 2))
    hook = commhooks.register(ddp, "none", verify=1)
    ddp.module[2].bias.register_hook(lambda grad: grad * (torch.nan if rank else 1.0))
    backward(ddp, 0, 0)
    cosines = hook.verification.report().set_index("parameter")["cosine"]
    assert np.isnan(cosines["2.bias"])
    assert cosines["0.bias"] > 0.9


def test_no_copy_of_the_gradient_is_kept_beside_sketches() -> None:
    scheme, layout = commhooks.make("int8"), Layout(["weight"], [(64, 64)])
    measured = Measurement(0, layout, torch.randn(4096), scheme)
    measured.finish(torch.randn(4096), Memory())
    assert not hasattr(measured, "_gradient")
    assert measured.sketches.numel() == 64
    measured = Measurement(0, layout, torch.randn(4096, dtype=torch.float64), scheme)
    measured.finish(torch.randn(4096, dtype=torch.float64), Memory())
    assert measured.sketches.dtype == torch.float64


@on_ranks(2)
def test_residuals_larger_than_gradients_break_no_law(rank: int) -> None:
    for name in ("acpsgd", "topk", "int4"):
        ddp = CoreDDP(mlp(16, 2))
        hook = commhooks.register(ddp, name, verify=1)
        for step in range(6):
            torch.manual_seed(10 * step + rank)
            ddp.zero_grad()
            (ddp(torch.randn(4, 16)).square().mean() * 0.001**step).backward()
        hook.verification.report()
        assert not hook.verification.findings, name


@pytest.mark.parametrize(("name", "world_size"), [("intsgd", 2), ("global_qsgd", 64)])
def test_a_law_allows_what_a_scale_of_several_ranks_or_steps_loses(
    name: str, world_size: int
) -> None:
    scheme, generator = commhooks.make(name), torch.Generator().manual_seed(0)
    ranks = Simulation(scheme, {"weight": (1024,)}, world_size=world_size)
    # A large entry in each block, of which the others are a fraction of a level; then all shrink.
    for factor in (1.0, 1.0, 1e-3):
        grads = [torch.randn(1024, generator=generator).sign() / 16 for _ in range(world_size)]
        for grad in grads:
            grad[::256] = 1.0
            grad *= factor
        mean = ranks.step([grad.clone() for grad in grads])[0]
        law = error_bound_of(scheme, world_size)
        error = float((mean - torch.stack(grads).mean(0)).norm())
        largest = max(float(grad.norm()) for grad in grads)
        assert law.rounding is None or error <= law.variance**0.5 * largest


SIZES = [
    ("int8", torch.float32, 1e-30),
    ("topk", torch.float32, 1e-30),
    ("none", torch.float32, 1e-42),
    ("int8", torch.float32, 1e30),
    ("none", torch.float32, 2e37),  # sums in sketches are beyond the range
    ("none", torch.float16, 1e-7),
    ("none", torch.bfloat16, 1e-7),
]


@on_ranks(3)
def test_gradients_at_the_ends_of_their_range_break_no_law(rank: int) -> None:
    for name, dtype, factor in SIZES:
        model = CoreDDP(nn.Linear(256, 16, bias=False).to(dtype))
        hook = commhooks.register(model, name, verify=1)
        for step in range(3):
            torch.manual_seed(10 * step + rank)
            model.zero_grad()
            # The gradient of a weight is the factor times its input.
            (model(torch.randn(1, 256).to(dtype)) * factor).sum().backward()
        errors = hook.verification.report()["error"]
        assert not hook.verification.findings, (name, dtype, factor)
        if (name, factor) == ("int8", 1e-30):
            # A norm that is not that of zeros: squares vanish in float32 before numbers do.
            assert all(0 < error < 0.1 for error in errors)
        hook.close()


@dataclass(frozen=True)
class Invents(Wrapper):
    """Returns ones."""

    scheme: Scheme

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        result = yield from self.scheme.exchange(bucket)
        return result._replace(mean=torch.ones_like(result.mean))


@on_ranks(2, ignore_warnings=("commhooks:",))
def test_an_average_of_zeros_is_zero() -> None:
    model = CoreDDP(nn.Linear(4, 4, bias=False))
    hook = commhooks.register(model, Invents(Dense()), verify=1)
    model(torch.zeros(1, 4)).sum().backward()
    hook.verification.report()
    (finding,) = map(str, hook.verification.findings)
    assert "has a norm of 4, though all gradients are zero" in finding
