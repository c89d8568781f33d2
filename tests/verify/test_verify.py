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
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import commhooks
from commhooks.core import Bucket, Scheme, Traits, Unbiased
from commhooks.core._bucket import SchemeExchange
from commhooks.core._dense import Dense
from commhooks.errors import OptionError, VerificationError
from commhooks.research.baselines import TernGrad
from commhooks.verify import Verification
from commhooks.verify import _verification as _verify
from commhooks.wrappers._base import Wrapper
from commhooks.wrappers._feedback import ErrorFeedback
from ddp_core import DistributedDataParallel as CoreDDP
from tests.tools.fake_torch import pretend
from tests.tools.harness import RankError, on_ranks, run_ranks
from tests.tools.models import Branches
from tests.tools.training import everyone, mlp, parameters

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
    stage: str
    on: int = 1
    parameter: str = "2.weight"
    variance: float = 0.0

    @property
    def traits(self) -> Traits:
        traits = self.scheme.traits
        return traits._replace(error=Unbiased(self.variance)) if self.variance else traits

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        spoils = bucket.step >= 2 and bucket.rank == self.on
        if self.stage == "encodes" and spoils:
            part = _part(bucket, bucket.raw, self.parameter)
            if part is not None:
                part.mul_(1.5)
        result = yield from self.scheme.exchange(bucket)
        part = _part(bucket, result.mean, self.parameter)
        if part is not None and bucket.step >= 2:
            if self.stage == "decodes" and spoils:
                part[3].add_(1e-7)
            if self.stage == "overflows" and spoils:
                part[3] = torch.inf
            if self.stage == "poisons":  # on all ranks, as what they keep of it
                for values in (result.mean, bucket.unsent):
                    _part(bucket, values, self.parameter)[3] = torch.nan
            if self.stage == "loses":  # on all ranks, and says that it has sent it
                part[:5].zero_()
        return result


def _bucket_of(step: int, parameter: str) -> int:
    """The bucket of a parameter of ``_verified_steps``: a layer each, the last layer the first."""
    # Both classes have all parameters in one bucket until the first backward pass is over.
    return 0 if step == 0 else {"4": 0, "2": 1, "0": 2}[parameter[0]]


class Trained(NamedTuple):
    """Findings after four steps, what was warned of, and rows of the report."""

    findings: list[Any]
    texts: list[str]
    rows: list[tuple[int, int, str]]


def _verified_steps(rank: int, wrong: Scheme, kind: str, action: Any) -> Trained:
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
        named, texts, rows = _verified_steps(rank, wrong, kind, "warn")
        assert named
        for step, bucket, parameter, text, ranks in named:
            assert (text, ranks) == (expected, on)
            assert bucket == _bucket_of(step, parameter)
            assert name is None or (step, parameter) == (2, name)
        assert everyone(named) == [named] * 3
        assert len(rows) == 2 * 6
        assert {step for step, _, _ in rows} == {0, 2}
        assert all(bucket == _bucket_of(step, parameter) for step, bucket, parameter in rows)
        if rank == on[0]:
            places = [(f"step {f[0]}, rank", f"bucket {f[1]}, parameter {f[2]!r}") for f in named]
            assert any(step in texts[-1] and place in texts[-1] for step, place in places)


@on_ranks(2)
def test_an_average_that_overflows_is_named_with_its_rank(rank: int) -> None:
    named = _verified_steps(rank, Wrong(Dense(), "overflows"), "torch", "warn").findings
    assert named == [(2, 1, "2.weight", kind, (1,)) for kind in ("ranks differ", "not finite")]


@on_ranks(2)
def test_a_residual_that_is_not_finite_hides_no_average(rank: int) -> None:
    wrong = ErrorFeedback(Wrong(commhooks.make("int4", error_feedback=False), "poisons"))
    assert _verified_steps(rank, wrong, "core", "warn").findings[0] == (
        2,
        1,
        "2.weight",
        "not finite",
        (0, 1),
    )


@on_ranks(2)
def test_with_raise_every_rank_raises_before_the_next_step(rank: int) -> None:
    with pytest.raises(VerificationError) as caught:
        _verified_steps(rank, Wrong(Dense(), "decodes"), "torch", "raise")
    text = str(caught.value)
    assert "step 2, rank 1, bucket 1, parameter '2.weight'" in text
    assert everyone(text) == [text] * 2


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
def test_a_finding_in_the_last_step_is_reported_however_a_hook_ends() -> None:
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
def test_a_finding_in_the_last_step_is_reported_at_exit(end: str, tmp_path: Path) -> None:
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
    assert everyone(str(caught.value)) == [str(caught.value)] * 2


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


def test_on_a_gpu_the_host_waits_for_no_work_of_the_training_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device, streams = pretend(monkeypatch), []

    def judge() -> tuple[list[Any], list[Any]]:  # copies to the host, in the current stream's order
        streams.append(device.current_stream())
        return [], []

    step: Any = SimpleNamespace(
        device=torch.device("cuda"),
        ready=lambda: True,
        wait=lambda: streams.append(device.current_stream()),
        judge=judge,
        bound=SimpleNamespace(name="int8"),
    )
    verification: Any = Verification(1)
    verification._group = SimpleNamespace(rank=lambda: 0)
    verification._pending.append(step)
    verification.metrics()
    assert len(streams) == 2
    assert device.current_stream() not in streams


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(OptionError, match="1 or more"):
        Verification(0)
    with pytest.raises(OptionError, match="'warn' or 'raise'"):
        Verification(1, "ignore")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="a number of rows"):
        Verification(1, history=-1)
