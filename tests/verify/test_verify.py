"""``register(verify=...)``: what it finds, and that training does not notice it."""

from __future__ import annotations

import gc
import subprocess
import sys
import time
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import commhooks
from commhooks import PerParameter, Rule, Simulation
from commhooks.core import Bucket, Scheme, Traits, Unbiased
from commhooks.core._bucket import SchemeExchange
from commhooks.core._dense import Dense
from commhooks.core._layout import Layout
from commhooks.core._memory import Memory
from commhooks.errors import OptionError, VerificationError
from commhooks.research.baselines import TernGrad
from commhooks.verify import Verification
from commhooks.verify import _verification as _verify
from commhooks.verify._equal import _CHUNK, hashes
from commhooks.verify._judge import error_bound_of
from commhooks.verify._measure import Measurement, norms_of
from commhooks.wrappers import DelayedStart, PeriodicDense, Schedule
from commhooks.wrappers._base import Wrapper
from commhooks.wrappers._feedback import ErrorFeedback
from ddp_core import DistributedDataParallel as CoreDDP
from tests.contract.cases import make as make_case
from tests.contract.cases import registered
from tests.tools.harness import RankError, on_ranks, run_ranks
from tests.tools.models import Branches
from tests.tools.training import averaged, mlp, parameters, row_of

KINDS: dict[str, Any] = {"torch": DistributedDataParallel, "core": CoreDDP}


def findings(hook: Any) -> list[Any]:
    """Step, bucket, parameter, kind and ranks of what a hook's verification has found."""
    return [finding[:5] for finding in hook.verification.findings]


def backward(model: nn.Module, step: int, rank: int, width: int = 16) -> None:
    """A step with random inputs of this step and rank."""
    torch.manual_seed(10 * step + rank)
    model.zero_grad()
    model(torch.randn(4, width)).square().mean().backward()


def _part(bucket: Bucket, flat: Tensor, name: str) -> Tensor | None:
    """The entries of one parameter in a flat tensor of the bucket."""
    names = bucket.layout.names
    return flat.view(-1).split(bucket.layout.sizes)[names.index(name)] if name in names else None


@dataclass(frozen=True)
class Wrong(Wrapper):
    """Spoils one parameter, in step 2 and later, on one rank or on all."""

    scheme: Scheme
    what: str
    on: int = 1
    parameter: str = "2.weight"
    variance: float = 0.0

    @property
    def traits(self) -> Traits:
        traits = self.scheme.traits
        return traits._replace(error=Unbiased(self.variance)) if self.variance else traits

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        spoils = bucket.step >= 2 and bucket.rank == self.on
        if self.what == "encodes" and spoils:
            part = _part(bucket, bucket.raw, self.parameter)
            if part is not None:
                part.mul_(1.5)
        result = yield from self.scheme.exchange(bucket)
        part = _part(bucket, result.mean, self.parameter)
        if part is not None and bucket.step >= 2:
            if self.what == "decodes" and spoils:
                part[3].add_(1e-7)
            if self.what == "overflows" and spoils:
                part[3] = torch.inf
            if self.what == "loses":  # on all ranks, and says that it has sent it
                part[:5].zero_()
        return result


def _bucket_of(step: int, parameter: str) -> int:
    """The bucket of a parameter of ``_train``: a layer is a bucket, the last layer the first."""
    # Both classes have all parameters in one bucket until the first backward pass is over.
    return 0 if step == 0 else {"4": 0, "2": 1, "0": 2}[parameter[0]]


class Trained(NamedTuple):
    """Findings after four steps, what was warned of, and rows of the report."""

    findings: list[Any]
    texts: list[str]
    rows: list[tuple[int, int, str]]


def _train(rank: int, wrong: Scheme, kind: str, action: Any) -> Trained:
    torch.manual_seed(0)
    ddp = KINDS[kind](mlp(16, 3), bucket_cap_mb=1088 / 2**20)  # a layer
    hook = commhooks.register(ddp, wrong, verify=Verification(2, action))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(4):
            backward(ddp, step, rank)
        frame = hook.verification.report()
    texts = [str(each.message) for each in caught if "commhooks:" in str(each.message)]
    rows = list(zip(frame["step"], frame["bucket"], frame["parameter"], strict=True))
    return Trained(findings(hook), texts, rows)


PLANTED: list[tuple[Scheme, str, tuple[str | None, str, tuple[int, ...]]]] = [
    (Wrong(Dense(), "decodes"), "torch", ("2.weight", "ranks differ", (1,))),
    (Wrong(ErrorFeedback(Dense()), "decodes", 2), "core", ("2.weight", "ranks differ", (2,))),
    (Wrong(Dense(), "encodes"), "torch", ("2.weight", "error", (0, 1, 2))),
    (
        ErrorFeedback(Wrong(commhooks.make("int4", error_feedback=False), "loses")),
        "core",
        ("2.weight", "error", (0, 1, 2)),
    ),
    (Wrong(TernGrad(), "encodes", variance=1e-4), "torch", (None, "error", (0, 1, 2))),
]


@on_ranks(3)
def test_a_planted_bug_is_named_with_step_rank_and_parameter(rank: int) -> None:
    for wrong, kind, (name, expected, on) in PLANTED:
        named, texts, rows = _train(rank, wrong, kind, "warn")
        assert named
        for step, bucket, parameter, text, ranks in named:
            assert (text, ranks) == (expected, on)
            assert bucket == _bucket_of(step, parameter)
            assert name is None or (step, parameter) == (2, name)
        everyone: list[Any] = [None] * 3
        dist.all_gather_object(everyone, named)
        assert everyone == [named] * 3
        assert len(rows) == 2 * 6
        assert {step for step, _, _ in rows} == {0, 2}
        assert all(bucket == _bucket_of(step, parameter) for step, bucket, parameter in rows)
        if rank == on[0]:
            places = [(f"step {f[0]}, rank", f"bucket {f[1]}, parameter {f[2]!r}") for f in named]
            assert any(step in texts[-1] and place in texts[-1] for step, place in places)


@on_ranks(2)
def test_an_average_that_overflows_is_named_with_its_rank(rank: int) -> None:
    named = _train(rank, Wrong(Dense(), "overflows"), "torch", "warn").findings
    assert named == [(2, 1, "2.weight", kind, (1,)) for kind in ("ranks differ", "not finite")]


@on_ranks(2)
def test_with_raise_every_rank_raises_before_the_next_step(rank: int) -> None:
    with pytest.raises(VerificationError) as caught:
        _train(rank, Wrong(Dense(), "decodes"), "torch", "raise")
    text = str(caught.value)
    assert "step 2, rank 1, bucket 1, parameter '2.weight'" in text
    texts = ["", ""]
    dist.all_gather_object(texts, text)
    assert texts == [text] * 2


@on_ranks(2)
def test_a_gradient_that_is_not_finite_is_named_with_its_rank_and_warned_of_once(rank: int) -> None:
    for name in ("int8", "powersgd"):
        ddp = DistributedDataParallel(mlp(16, 2))
        hook = commhooks.register(ddp, name, verify=Verification(1, "raise"))
        backward(ddp, 0, rank)
        handle = ddp.module[2].bias.register_hook(lambda grad: grad * torch.nan)
        if rank != 1:
            handle.remove()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(2):
                backward(ddp, step, rank)
            hook.verification.report()
        assert sum("not finite" in str(each.message) for each in caught) == 1
        assert findings(hook) == [(step, 0, "2.bias", "not finite", (1,)) for step in (1, 2)]


# ---- training does not notice


def _weights(rank: int, kind: str, mode: str, **verified: Any) -> Tensor:
    torch.manual_seed(0)
    unused = mode == "unused"
    model: nn.Module = Branches() if unused else mlp(16, 2)
    ddp = KINDS[kind](
        model,
        bucket_cap_mb=0.002,
        find_unused_parameters=unused,
        static_graph=mode == "static",
        gradient_as_bucket_view=mode == "views",
    )
    name, options = {
        "coalesced": ("powersgd", {"rank": 1, "coalesce": True}),
        "update": ("dgc", {}),
    }.get(mode, ("topk", {"ratio": 0.2}))
    hook = commhooks.register(ddp, name, **verified, **options)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0, enabled=mode == "scaler")
    saved: Any = None
    for step in range(6):
        torch.manual_seed(10 * step + rank)
        optimizer.zero_grad()
        x = torch.randn(4, 16)
        if mode == "scaler" and step == 2:
            x[0, 0] = torch.inf
        if mode == "accumulation":
            with ddp.no_sync():
                ddp(torch.randn(4, 16)).square().mean().backward()
        loss = (ddp(x, step % 2) if unused else ddp(x)).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if mode == "switch" and step == 2:
            hook.switch("int8")
        if mode == "loaded" and step == 2:
            saved = hook.state_dict()
        if mode == "loaded" and step == 4:
            hook.load_state_dict(saved)
    if verified:
        hook.verification.report()
        wrong = [each for each in hook.verification.findings if each.kind != "not finite"]
        assert not wrong, wrong
        assert hook.verification.steps >= 5
    hook.close()
    return parameters(model)


MODES = ["plain", "views", "accumulation", "scaler", "unused", "static", "coalesced"]
MODES += ["switch", "loaded", "update"]


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2, ignore_warnings=(".*",))
def test_training_is_the_same_bit_for_bit(rank: int, kind: str) -> None:
    for mode in MODES:
        unverified = _weights(rank, kind, mode)
        assert torch.equal(unverified, _weights(rank, kind, mode, verify=1)), mode


def _fails(rank: int, world_size: int) -> None:
    ddp = DistributedDataParallel(mlp(16, 2))
    hook = commhooks.register(ddp, "int8", verify=1)
    for step in range(3):
        if step == 2 and rank == 1:
            raise ArithmeticError("on purpose")
        backward(ddp, step, rank)
    assert hook.verification is not None


def test_a_rank_that_fails_does_not_leave_the_others_waiting() -> None:
    begin = time.monotonic()
    with pytest.raises(RankError, match="on purpose") as caught:
        run_ranks(_fails, 2, pg_timeout=5)
    assert "hung" not in str(caught.value)
    assert time.monotonic() - begin < 15


@on_ranks(2)
def test_hooks_are_verified_independently_of_each_other(rank: int) -> None:
    models = [CoreDDP(mlp(16, 2)), DistributedDataParallel(mlp(16, 2))]
    hooks = [commhooks.register(ddp, "int8", verify=k + 1) for k, ddp in enumerate(models)]
    for step in range(4):
        for model in models if step % 2 else models[::-1]:
            backward(model, step, rank)
    for hook, steps in zip(hooks, (4, 2), strict=True):
        hook.verification.report()
        assert not hook.verification.findings
        assert hook.verification.steps == steps
        hook.close()


@on_ranks(2)
def test_a_hook_that_is_removed_looks_at_its_last_verified_step(rank: int) -> None:
    for name in ("int8", "topk"):
        ddp = CoreDDP(mlp(16, 2))
        verification = commhooks.register(ddp, name, verify=1).verification
        for step in range(6):
            backward(ddp, step, rank)
            if step == 2:
                commhooks.unregister(ddp)
        again = commhooks.register(ddp, name, verify=1).verification
        backward(ddp, 6, rank)
        again.report()
        assert (verification.steps, len(verification._pending), again.steps) == (3, 0, 1)


@on_ranks(2)
def test_a_hook_closes_without_a_peer_that_is_late(rank: int) -> None:
    ddp = CoreDDP(mlp(16, 2))
    hook = commhooks.register(ddp, "int8", verify=1)
    store = dist.distributed_c10d._get_default_store()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_verify, "_AT_CLOSE", 0.1)
        if rank == 1:
            on_step_end = Verification.on_step_end

            def late(*arguments: Any) -> None:
                store.wait(["closed"], timedelta(seconds=10))  # raises if it never comes
                on_step_end(*arguments)

            patch.setattr(Verification, "on_step_end", late)
        backward(ddp, 0, rank)
        hook.close()
    if rank == 0:
        store.set("closed", "")
    assert not hook.verification._pending


# ---- what the last steps show


def _wrong_hook(action: Any) -> tuple[CoreDDP, Any]:
    """A model after three steps, the last of which is verified and wrong on rank 1."""
    torch.manual_seed(0)
    ddp = CoreDDP(mlp(16, 3))
    hook = commhooks.register(ddp, Wrong(Dense(), "decodes"), verify=Verification(2, action))
    for step in range(3):
        backward(ddp, step, 0)
    return ddp, hook


def _warns(ends: Callable[[], object]) -> bool:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ends()
    return any("other bits here" in str(each.message) for each in caught)


@on_ranks(2, ignore_warnings=("commhooks:",))
def test_a_finding_in_the_last_step_is_told_however_a_hook_ends() -> None:
    for action in ("warn", "raise"):
        ddp, hook = _wrong_hook(action)
        assert _warns(hook.close)
        ddp, hook = _wrong_hook(action)
        # As a page does, which raises nothing and tells of all.
        hook.verification.latest(wait=True)
        assert _warns(hook.close) or action == "warn"
        ddp, hook = _wrong_hook(action)
        assert _warns(partial(commhooks.unregister, ddp))
        kept = [_wrong_hook(action)]
        dropped = weakref.ref(kept[0][1])
        assert _warns(lambda: (kept.clear(), gc.collect()))  # noqa: B023
        assert dropped() is None


AT_EXIT = """
import torch, torch.distributed as dist, commhooks
from commhooks.core._dense import Dense
from ddp_core import DistributedDataParallel
from tests.verify.test_verify import Wrong
from tests.tools.training import mlp

dist.init_process_group("gloo", init_method="file://{path}", rank=0, world_size=1)
model = DistributedDataParallel(mlp(16, 2))
verify = commhooks.Verification(2, "raise")
commhooks.register(model, Wrong(Dense(), "encodes", on=0), verify=verify)
for _ in range(3):
    model(torch.randn(4, 16)).square().mean().backward()
"""


@pytest.mark.parametrize(
    "end", ["dist.destroy_process_group()", pytest.param("", marks=pytest.mark.slow)]
)
def test_a_finding_in_the_last_step_is_told_at_exit(end: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", AT_EXIT.format(path=tmp_path / "store") + end],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "step 2, rank 0, bucket 0, parameter '2.weight': the average of" in done.stderr


@on_ranks(2)
def test_a_verification_serves_again_where_no_hook_has_it(rank: int) -> None:
    verification = Verification(1)
    with pytest.raises(commhooks.errors.MismatchError):
        commhooks.register(CoreDDP(mlp(16, 2)), "int4" if rank else "int8", verify=verification)
    ddp = CoreDDP(mlp(16, 2))
    commhooks.register(ddp, "int8", verify=verification)
    backward(ddp, 0, rank)
    commhooks.unregister(ddp)
    hook = commhooks.register(CoreDDP(mlp(16, 2)), "int8", verify=verification)
    assert hook.verification is verification


@on_ranks(2)
def test_whoever_looks_at_a_finding_all_ranks_raise_in_the_next_step(rank: int) -> None:
    with pytest.raises(OptionError, match=r"a number of steps, a commhooks\.Verification or None"):
        commhooks.register(CoreDDP(mlp(16, 2)), "int8", verify="raise")  # type: ignore[arg-type]
    verification = Verification(1)
    owner = commhooks.register(CoreDDP(mlp(16, 2)), "int8", verify=verification)
    with pytest.raises(OptionError, match="another hook's"):
        commhooks.register(CoreDDP(mlp(16, 2)), "int8", verify=verification)
    owner.close()
    ddp, hook = _wrong_hook("raise")
    if rank == 0:  # alone, which raises nothing
        hook.verification.report()
        hook.metrics()
        assert "finding" in str(hook.verification)
    with pytest.raises(VerificationError) as caught:
        ddp(torch.randn(4, 16))
    texts = ["", ""]
    dist.all_gather_object(texts, str(caught.value))
    assert texts[0] == texts[1]


class _Failed:
    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        raise RuntimeError("on purpose")


@on_ranks(2)
def test_a_hook_closes_where_a_peer_failed_in_the_verification(rank: int) -> None:
    for removes in (False, True):
        ddp = CoreDDP(mlp(16, 2))
        hook = commhooks.register(ddp, "int8", verify=1)
        backward(ddp, 0, rank)
        verification: Any = hook.verification
        lane_group = verification._lane_group
        verification._pending[0].works.append(_Failed())
        commhooks.unregister(ddp) if removes else hook.close()
        assert lane_group.unusable
        assert verification._lane_group is None
        assert not verification._pending


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(OptionError, match="1 or more"):
        Verification(0)
    with pytest.raises(OptionError, match="'warn' or 'raise'"):
        Verification(1, "ignore")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="a number of rows"):
        Verification(1, history=-1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_a_hash_depends_on_every_bit_and_its_place(dtype: torch.dtype) -> None:
    x = torch.randn(_CHUNK + 500, generator=torch.Generator().manual_seed(0)).to(dtype)
    sizes = [0, 7, _CHUNK + 400, 93, 0]
    before = hashes(x, sizes)
    for place, owner in ((3, 1), (_CHUNK + 2, 2), (_CHUNK + 499, 3)):
        y = x.clone()
        y[place] = torch.nextafter(y[place].float(), torch.tensor(9.0)).to(dtype) + 0.01
        assert (hashes(y, sizes) != before).nonzero().view(-1).tolist() == [owner]
    swapped = x.clone()
    swapped[[1, 2]] = x[[2, 1]]
    assert (hashes(swapped, sizes) != before).nonzero().view(-1).tolist() == [1]
    assert torch.equal(hashes(torch.zeros(4), [4]), hashes(-torch.zeros(4), [4]))
    assert hashes(x[:0], [0, 0]).tolist() == [0, 0]


def test_a_hash_depends_on_the_order_of_chunks() -> None:
    x = torch.randn(_CHUNK, generator=torch.Generator().manual_seed(0))
    swapped = torch.cat([*x.chunk(2)][::-1])
    assert hashes(swapped, [_CHUNK]) != hashes(x, [_CHUNK])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_two_wrong_signs_do_not_cancel_in_a_hash(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1000, generator=generator).sign().to(dtype) * 0.5
    before = hashes(x, [1000])
    for _ in range(100):
        places = torch.randperm(1000, generator=generator)[:2]
        y = x.clone()
        y[places] *= -1
        assert hashes(y, [1000]) != before
    flipped = x.clone()  # a power of two apart, where a product modulo 2^32 may be the same
    flipped[::128] *= 2
    shifted = x.clone()
    shifted[64::128] *= 2
    assert hashes(flipped, [1000]) != hashes(shifted, [1000])


# ---- a correct scheme breaks no law


def test_norms_of_a_mean_with_gaps() -> None:
    """Such as a column of what a scheme has received: the engine takes it, verified or not."""
    mean = torch.arange(24.0).view(12, 2)[:, 1]
    assert torch.equal(norms_of(mean, [5, 0, 7]), norms_of(mean.double(), [5, 0, 7]))


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
        hook = commhooks.register(ddp, scheme, verify=1)
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


def _reports(rank: int, name: str, steps: int, **options: Any) -> tuple[list[str], Any, Any]:
    """Parameters, and rows of error, cosine and norm: as reported, and computed from gradients."""
    rows = {}
    torch.manual_seed(0)
    ddp = DistributedDataParallel(mlp(96, 2), bucket_cap_mb=0.01)
    hook = commhooks.register(ddp, name, verify=1, **options)
    for step in range(steps):
        torch.manual_seed(10 * step + rank)
        ddp.zero_grad()
        x = torch.randn(4, 96)
        # What feedback sends late is many times the gradients once these shrink.
        size = 1.0 if step < 20 else 0.1
        loss = ddp.module(x).square().mean() * size
        exact = torch.autograd.grad(loss, list(ddp.parameters()))
        (ddp(x).square().mean() * size).backward()
        for (key, parameter), gradient in zip(ddp.module.named_parameters(), exact, strict=True):
            rows[step, key] = row_of(parameter.grad, averaged(gradient))
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


@on_ranks(2)
def test_errors_many_times_the_dense_mean_are_told_as_well(rank: int) -> None:
    """The norm of the dense mean is then not what remains of larger, inexact numbers."""
    parameters, sketch, exact = _reports(rank, "topk", 30, ratio=0.01)
    weights = np.array(["weight" in parameter for parameter in parameters])
    assert float(exact[weights, 0].max()) > 3
    off = np.abs(sketch / exact - 1)[weights]
    # Of two sketches each, of 127 numbers.
    assert float(off[:, [0, 2]].max()) < 4 * 2**0.5 * (2 * 127) ** -0.5
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
    assert not hasattr(measured, "_difference")
    assert measured.sketches.numel() == 61
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
