"""Reduction at a named point: ``hold`` and ``reduce``, and errors where a pass is half inside."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import commhooks
from ddp_core import DistributedDataParallel, MixedPrecision
from tests.ddp import test_ddp_steps as ddp_steps
from tests.tools.harness import on_ranks, run_ranks
from tests.tools.models import Cnn, loss_of
from tests.tools.training import averaged, batch, equal_on_all_ranks, gradients, mlp, outcome

STEPS = 4
SMALL = {"bucket_cap_mb": 0.002}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "view": {"gradient_as_bucket_view": True},
    "find_unused": {"find_unused_parameters": True},
    "skips_unused": {"find_unused_parameters": True, "skip_all_reduce_unused_params": True},
    "static_graph": {"static_graph": True},
    "precision": {"mixed_precision": MixedPrecision(torch.bfloat16, torch.float32)},
}


def add_pass(model: nn.Module, step: int, micro: int, rank: int, **more: Any) -> None:
    """Forward and backward."""
    loss_of(model(batch(10 * step + micro, rank, 4, 16), **more)).backward()


# ---- what is averaged


@pytest.mark.parametrize("options", OPTIONS)
@on_ranks(2)
def test_reduce_gives_what_a_last_pass_outside_of_no_sync_gives(rank: int, options: Any) -> None:
    options = OPTIONS[options]
    held, other = (DistributedDataParallel(mlp(), **SMALL, **options) for _ in range(2))
    for step in range(STEPS):
        for model in (held, other):
            model.zero_grad()
        for micro in range(3):
            with held.hold():
                add_pass(held, step, micro, rank)
            with contextlib.nullcontext() if micro == 2 else other.no_sync():
                add_pass(other, step, micro, rank)
        held.reduce()
        # Buckets are laid out by the same order of arrival, and gradients are scaled as there.
        torch.testing.assert_close(gradients(held), gradients(other), rtol=0, atol=0)
        assert held.reducer.launcher.step == step + 1


@on_ranks(3)
def test_ranks_run_as_many_passes_as_they_like_and_nothing_travels_between(
    rank: int, world_size: int
) -> None:
    """Rank r runs r passes in step 0, more by one in each step; the last rank then has none."""
    model, local = DistributedDataParallel(Cnn(), **SMALL), Cnn()
    local.load_state_dict(model.module.state_dict())
    for step in range(STEPS):
        model.zero_grad()
        local.zero_grad()
        with model.hold():
            for micro in range((rank + step) % world_size):
                images = batch(10 * step + micro, rank, 4, 3, 8, 8)
                loss_of(model(images)).backward()
                loss_of(local(images)).backward()
        model.reduce()
        torch.testing.assert_close(gradients(model), averaged(gradients(local)))
        assert equal_on_all_ranks(*model.buffers())  # those of rank 0
        model.eval()
        with torch.no_grad():  # after which a forward pass would leave buffers as they are
            model(batch(step, rank, 4, 3, 8, 8))
        model.train()
        local.load_state_dict(model.module.state_dict())


class Branches(nn.Module):
    """Two branches, of which a pass uses one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.branches = nn.ModuleList(mlp(seed=seed) for seed in range(3))

    def forward(self, x: Tensor, branch: int) -> Tensor:
        return self.branches[branch](x)


@on_ranks(2)
def test_hold_goes_with_passes_that_average_and_with_no_sync(rank: int) -> None:
    """Whatever synchronises first averages what was held."""
    model, local = DistributedDataParallel(mlp(), **SMALL), mlp()
    for step, averages in enumerate(("pass", "reduce", "no_sync and reduce", "within", "pass")):
        model.zero_grad()
        local.zero_grad()
        with model.hold(), model.hold():
            add_pass(model, step, 0, rank)
            if averages == "within":
                add_pass(model, step, 1, rank)
                model.reduce()
        if averages == "no_sync and reduce":
            with model.no_sync():
                add_pass(model, step, 1, rank)
        if averages == "pass":
            add_pass(model, step, 1, rank)
        elif averages != "within":
            model.reduce()
        for micro in range(1 if averages == "reduce" else 2):
            add_pass(local, step, micro, rank)
        torch.testing.assert_close(gradients(model), averaged(gradients(local)))
    assert model.require_backward_grad_sync


@on_ranks(2)
def test_passes_after_reduce_within_hold_are_held(rank: int) -> None:
    model = DistributedDataParallel(mlp(), **SMALL)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with model.hold():
        add_pass(model, 0, 0, rank)
        model.reduce()
        optimizer.step()
        add_pass(model, 0, 1, rank)
        assert "hold" in (outcome(optimizer.step) or ("", ""))[1]


class Recorder(ddp_steps.Recorder):
    """Also tells the last bucket from the others, and holds none back."""

    def hook(self, bucket: Any) -> torch.futures.Future[Tensor]:
        self.notifications.append("last" if bucket.is_last() else "bucket")
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(averaged(bucket.buffer()))
        return future


@on_ranks(2)
def test_a_hook_is_notified_of_one_step_and_the_timeline_has_it(rank: int) -> None:
    model, state = DistributedDataParallel(mlp(), **SMALL), Recorder()
    model.register_comm_hook(state, Recorder.hook)
    for step in range(3):
        model.zero_grad()
        with model.hold():
            for micro in range(2):
                add_pass(model, step, micro, rank)
        assert state.notifications == []
        model.reduce()
        buckets = ["bucket"] * (len(model.reducer.buckets) - 1)
        assert state.notifications == [*buckets, "last", "end", "landed"]
        state.notifications.clear()
    frame = model.timeline.frame()
    assert set(frame.step) == {0, 1, 2}


@on_ranks(2)
def test_a_reduce_that_raises_is_a_step_that_was_abandoned(rank: int) -> None:
    model, state = DistributedDataParallel(mlp(), **SMALL), Recorder()

    def hook(state: Any, bucket: Any) -> Any:
        if bucket.index() == 1 and "broken" in state.notifications:
            raise ArithmeticError("on purpose")
        return Recorder.hook(state, bucket)

    model.register_comm_hook(state, hook)
    with model.hold():
        add_pass(model, 0, 0, rank)
    model.reduce()  # buckets are rebuilt before the next one
    state.notifications.clear()
    with model.hold():
        add_pass(model, 1, 0, rank)
    state.notifications.append("broken")
    with pytest.raises(Exception, match="on purpose"):
        model.reduce()
    assert state.notifications == ["broken", "bucket", "abandoned"]
    state.notifications.clear()
    model.zero_grad()
    local = mlp()
    with model.hold():
        add_pass(model, 2, 0, rank)
    add_pass(local, 2, 0, rank)
    model.reduce()
    torch.testing.assert_close(gradients(model), averaged(gradients(local)))
    assert state.notifications[-1] == "landed"
    assert "abandoned" not in state.notifications


# ---- hosts of other features


@pytest.mark.parametrize("schedule", ["Schedule1F1B", "ScheduleGPipe"])
@on_ranks(4, timeout=90, ignore_warnings=(".*",))
def test_a_pipeline_of_torchs_is_one_step_per_schedule(schedule: str) -> None:
    """Two stages, each in two replicas, with torch's schedules."""
    from torch.distributed import pipelining
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "stage"))
    place, replica = mesh["stage"].get_local_rank(), mesh["replica"].get_local_rank()
    whole = mlp(depth=4)
    part = whole[:4] if place == 0 else whole[4:]
    model = DistributedDataParallel(part, process_group=mesh["replica"].get_group(), **SMALL)
    hook = commhooks.register(model, "none")
    stage = pipelining.PipelineStage(
        model, place, 2, torch.device("cpu"), group=mesh["stage"].get_group()
    )
    steps = getattr(pipelining, schedule)(stage, 4, loss_fn=lambda y, _: y.square().mean())
    for step in range(3):
        model.zero_grad()
        with model.hold():
            if place == 0:
                steps.step(batch(step, replica, 8, 16))
            else:
                steps.step(target=torch.zeros(8, 16))
        model.reduce()
        whole_alone = mlp(depth=4)
        for peer in range(2):
            whole_alone(batch(step, peer, 8, 16)).square().mean().backward()
        alone = whole_alone[:4] if place == 0 else whole_alone[4:]
        torch.testing.assert_close(gradients(model), gradients(alone) / 2)
    assert hook.step == 3


# ---- errors


@on_ranks(2)
def test_an_optimizer_refuses_gradients_that_are_held(rank: int) -> None:
    model = DistributedDataParallel(mlp(), **SMALL)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    other = torch.optim.SGD([nn.Parameter(torch.zeros(3))], 0.1)
    with model.hold():
        add_pass(model, 0, 0, rank)
    kind, text = outcome(optimizer.step) or ("", "")
    assert kind == "RuntimeError"
    assert "0.weight" in text
    assert "reduce()" in text
    other.step()
    optimizer.zero_grad()
    optimizer.step()  # nothing to step by
    with model.hold():
        add_pass(model, 1, 0, rank)
    model.reduce()
    optimizer.step()
    with model.hold():
        add_pass(model, 2, 0, rank)
    del model  # nobody averages these any more
    optimizer.step()


@on_ranks(2)
def test_a_pass_of_which_one_half_is_inside_is_an_error(rank: int) -> None:
    model, local = DistributedDataParallel(mlp(), **SMALL), mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    for context in (model.no_sync, model.hold):
        loss = loss_of(model(batch(0, rank, 4, 16)))
        with context():
            kind, text = outcome(loss.backward) or ("", "")
        assert kind == "RuntimeError"
        assert "its forward pass was outside" in text
        model.zero_grad()
    # Forward alone is right if a pass that averages follows, so only a step before that is wrong.
    with model.no_sync():
        loss = loss_of(model(batch(0, rank, 4, 16)))
    loss.backward()
    with pytest.raises(RuntimeError, match="whose forward pass was inside"):
        optimizer.step()
    add_pass(model, 1, 0, rank)
    loss_of(local(batch(0, rank, 4, 16))).backward()
    add_pass(local, 1, 0, rank)
    torch.testing.assert_close(gradients(model), averaged(gradients(local)))
    optimizer.step()
    with model.no_sync():  # local steps on purpose
        add_pass(model, 2, 0, rank)
        optimizer.step()
    model.zero_grad()
    model.require_backward_grad_sync = False  # as some trainers do it
    add_pass(model, 3, 0, rank)
    optimizer.step()
    model.require_backward_grad_sync = True


@on_ranks(2)
def test_torchs_class_follows_the_forward_pass_without_a_word(rank: int) -> None:
    """In both cases, which the design page says."""
    model, local = TorchDDP(mlp()), mlp()
    loss = loss_of(model(batch(0, rank, 4, 16)))
    with model.no_sync():
        loss.backward()
    loss_of(local(batch(0, rank, 4, 16))).backward()
    torch.testing.assert_close(gradients(model), averaged(gradients(local)))
    model.zero_grad()
    with model.no_sync():
        loss = loss_of(model(batch(0, rank, 4, 16)))
    loss.backward()
    torch.testing.assert_close(gradients(model), gradients(local))


@on_ranks(2)
def test_a_second_reduce_is_an_error_on_all_ranks(rank: int) -> None:
    model = DistributedDataParallel(mlp(), **SMALL)
    hook = commhooks.register(model, "none")
    nothing = "no rank has a gradient"
    assert nothing in (outcome(model.reduce) or ("", ""))[1]
    add_pass(model, 0, 0, rank)
    assert nothing in (outcome(model.reduce) or ("", ""))[1]
    model.zero_grad()
    with model.hold():
        add_pass(model, 1, 0, rank)
    before = gradients(model)
    model.reduce()
    torch.testing.assert_close(gradients(model), averaged(before))
    assert nothing in (outcome(model.reduce) or ("", ""))[1]
    torch.testing.assert_close(gradients(model), averaged(before))
    assert hook.step == 2
    with model.hold():
        add_pass(model, 2, 0, rank)
    model.zero_grad()
    assert nothing in (outcome(model.reduce) or ("", ""))[1]


@on_ranks(2)
def test_a_parameter_without_gradient_is_an_error_on_all_ranks(rank: int) -> None:
    model = DistributedDataParallel(Branches(), **SMALL)
    with model.hold():
        for branch in range(3 if rank else 2):
            add_pass(model, 0, branch, rank, branch=branch)
    kind, text = outcome(model.reduce) or ("", "")
    assert kind == "RuntimeError"
    assert "1 of the ranks" in text
    assert "find_unused" in text
    assert ("branches.2.0.weight" in text) == (rank == 0)
    model.zero_grad()
    with model.hold():
        for branch in range(3):
            add_pass(model, 0, branch, rank, branch=branch)
    before = gradients(model)
    model.reduce()
    torch.testing.assert_close(gradients(model), averaged(before))


@on_ranks(2)
def test_a_forward_pass_without_backward_makes_no_held_pass_a_step(rank: int) -> None:
    model, local = DistributedDataParallel(mlp(), **SMALL), mlp()
    hook = commhooks.register(model, "none")
    model(batch(9, rank, 4, 16))  # an evaluation without no_grad, say
    with model.hold():
        for micro in range(2):
            add_pass(model, 0, micro, rank)
            add_pass(local, 0, micro, rank)
    assert hook.step == 0
    model.reduce()
    torch.testing.assert_close(gradients(model), averaged(gradients(local)))
    assert hook.step == 1


@on_ranks(1)
def test_reduce_within_a_backward_pass_is_an_error(rank: int) -> None:
    model = DistributedDataParallel(mlp(), **SMALL)
    output = model(batch(0, rank, 4, 16))
    output.register_hook(lambda _: model.reduce())
    with pytest.raises(RuntimeError, match="within a backward pass"):
        output.sum().backward()


def _dies(rank: int, world_size: int) -> str:
    model = DistributedDataParallel(mlp(), **SMALL)
    with model.hold():
        add_pass(model, 0, 0, rank)
    if rank:
        import os

        os._exit(3)
    return (outcome(model.reduce) or ("", ""))[0]


def test_a_rank_that_has_died_before_reduce_is_noticed() -> None:
    error, _ = run_ranks(_dies, 2, may_die=[1])
    assert error == "CollectiveError"
