"""Graphs that change, backward passes in parts, and ranks without inputs."""

from __future__ import annotations

import contextlib
import copy
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.utils.checkpoint import checkpoint

from ddp_core import CollectiveError, DistributedDataParallel, MixedPrecision
from tests.tools.harness import on_ranks
from tests.tools.models import Branches, Breaks, SometimesUnused, frozen_part, loss_of
from tests.tools.training import (
    averaged,
    batch,
    equal_on_all_ranks,
    gradients,
    mlp,
    outcome,
    parameters,
)

LOW = MixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
    "view": {"gradient_as_bucket_view": True},
    "unused-view": {"find_unused_parameters": True, "gradient_as_bucket_view": True},
    "skipping": {"find_unused_parameters": True, "skip_all_reduce_unused_params": True},
    "static-skipping": {"static_graph": True, "skip_all_reduce_unused_params": True},
    "low": {"mixed_precision": LOW},
    "low-unused": {"mixed_precision": LOW, "find_unused_parameters": True},
    "low-static": {"mixed_precision": LOW, "static_graph": True},
}

# ---- ways to come to a loss: gradients are in ``.grad`` afterwards


def penalty_only(model: nn.Module, x: Tensor) -> None:
    (slope,) = torch.autograd.grad(model(x).float().sum(), x, create_graph=True)
    slope.square().sum().backward()


def saliency_first(model: nn.Module, x: Tensor) -> None:
    output = model(x)
    torch.autograd.grad(output.sum(), x, retain_graph=True)
    loss_of(output).backward()


def attacked_first(model: nn.Module, x: Tensor) -> None:
    model(x).sum().backward(inputs=[x])
    assert x.grad is not None
    loss_of(model((x + 0.1 * x.grad.sign()).detach())).backward()


def functional_first(model: nn.Module, x: Tensor) -> None:
    torch.autograd.grad(loss_of(model(x)), list(model.parameters()))
    loss_of(model(x)).backward()


def evaluated_within(model: nn.Module, x: Tensor) -> None:
    def look(grad: Tensor) -> None:
        with torch.no_grad():
            model(2 * x)

    output = model(x)
    output.register_hook(look)
    loss_of(output).backward()


def recomputed(model: nn.Module, x: Tensor) -> None:
    loss_of(checkpoint(model, x, use_reentrant=True)).backward()


WAYS = (
    *(penalty_only, saliency_first, attacked_first),
    *(functional_first, evaluated_within, recomputed),
)


@pytest.mark.slow
@on_ranks(2, timeout=100)
def test_every_way_to_a_loss_gives_the_mean(rank: int) -> None:
    for (name, options), way in itertools.product(OPTIONS.items(), WAYS):
        local = mlp()
        model = DistributedDataParallel(copy.deepcopy(local), bucket_cap_mb=0.001, **options)
        model.timeline.first = 2  # arrivals of recorded steps take another path
        for step in range(3):
            for replica in (model, local):
                replica.zero_grad()
                for part in (100 + step, step) if "unused" in name else (step,):
                    quiet = part >= 100 and replica is model
                    with model.no_sync() if quiet else contextlib.nullcontext():
                        way(replica, batch(part, rank, 4, 16).requires_grad_())
            ours, expected = gradients(model), averaged(gradients(local))
            # bfloat16 has 8 bits; gradients here are sums of a few dozen products.
            share = 2.0**-5 if "low" in name else 1e-5
            bound = share * float(expected.abs().max())
            assert float((ours - expected).abs().max()) <= bound, (name, way, step)


class Broken(nn.Module):
    """Layers between which backward may raise."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = mlp(seed=1), nn.Linear(16, 64)

    def forward(self, x: Tensor, breaks: bool) -> Tensor:
        return self.last(Breaks.apply(self.first(x), breaks))


@pytest.mark.slow
@on_ranks(2)
def test_ranks_stay_equal_when_backward_raises_between_steps_in_backward(rank: int) -> None:
    module = Broken()
    _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})
    model = DistributedDataParallel(module, bucket_cap_mb=0.0005)
    for step in range(8):
        breaks = step in (0, 3, 4)
        loss = loss_of(model(batch(step, rank, 4, 16), breaks))
        with pytest.raises(ArithmeticError) if breaks else contextlib.nullcontext():
            loss.backward()
    assert equal_on_all_ranks(*model.parameters())


# ---- graphs that change


# What the ranks use in each step.
CHANGES = [[(0, 0), (2, 2)], [(0, 0), (0, 0), (0, 2)], [(1, 1), (0, 1)]]


@pytest.mark.slow
@pytest.mark.parametrize("uses", CHANGES)
@on_ranks(2)
def test_a_static_graph_that_changes_is_an_error_in_that_backward(rank, uses):
    model = DistributedDataParallel(Branches(), static_graph=True, bucket_cap_mb=0.001)
    errors = []
    for step, choices in enumerate(uses):
        model.zero_grad()
        loss = loss_of(model(batch(step, rank, 4, 16), choices[rank]))
        errors.append(outcome(loss.backward))
    assert errors[:-1] == [None] * (len(uses) - 1)
    name, text = errors[-1]
    assert "Your training graph has changed in this iteration" in text
    changed = uses[0][rank] != uses[-1][rank]
    assert name == ("RuntimeError" if changed else CollectiveError.__name__)
    logged = model._get_ddp_logging_data()["error"]
    assert "Your training graph has changed in this iteration" in logged or not changed


@pytest.mark.slow
@on_ranks(2)
def test_gradients_that_would_stay_local_are_an_error(rank: int) -> None:
    model = DistributedDataParallel(SometimesUnused(), find_unused_parameters=True)
    left, right = model(batch(0, rank, 4, 16))
    loss_of(left).backward(retain_graph=True)
    error = outcome(loss_of(right).backward)
    assert error is not None
    assert "right" in error[1], error
    assert "call backward on the sum" in error[1]
    model.zero_grad()
    loss_of(model(batch(1, rank, 4, 16))).backward()  # the step after is right
    twice = DistributedDataParallel(mlp())
    x = batch(0, rank, 4, 16).requires_grad_()
    with pytest.raises(Exception, match="marked as ready twice"):
        loss_of(twice(checkpoint(twice, x, use_reentrant=True))).backward()


@pytest.mark.slow
@on_ranks(1)
def test_a_parameter_that_was_frozen_and_is_trained_is_an_error(rank: int) -> None:
    model = DistributedDataParallel(frozen_part())
    compiled = torch.compile(DistributedDataParallel(frozen_part()), backend="aot_eager")
    for step, called in enumerate((model, copy.deepcopy(model), model, compiled)):
        loss_of(called(batch(step, rank, 4, 16))).backward()
    model.module.requires_grad_(True)
    error = outcome(loss_of(model(batch(1, rank, 4, 16))).backward)
    assert error is not None
    assert "2.weight was frozen" in error[1] or "2.bias was frozen" in error[1]


# ---- skipped buckets


@pytest.mark.slow
@on_ranks(2)
def test_buckets_are_skipped_where_no_rank_has_a_gradient(rank):
    def count(state: Any, bucket: Any) -> torch.futures.Future[Tensor]:
        launched.append(bucket.is_last())
        return default_hooks.allreduce_hook(None, bucket)

    launched: list[bool] = []
    skipped = []
    torch.manual_seed(0)
    local = Branches()
    options = OPTIONS["skipping"]
    model = DistributedDataParallel(copy.deepcopy(local), bucket_cap_mb=0.0005, **options)
    model.register_comm_hook(None, count)
    for step, (choice, earlier) in enumerate([(0, 0), (rank, rank), (2, rank), (2, 2), (1, 2)]):
        launched.clear()
        for replica in (model, local):
            replica.zero_grad()
            with contextlib.nullcontext() if replica is local else model.no_sync():
                loss_of(replica(batch(100 + step, rank, 4, 16), earlier)).backward()
            loss_of(replica(batch(step, rank, 4, 16), choice)).backward()
        expected = averaged(gradients(local))
        torch.testing.assert_close(gradients(model), expected, rtol=1e-5, atol=1e-7)
        assert launched == [False] * (len(launched) - 1) + [True]
        assert model._get_ddp_logging_data()["num_buckets_reduced"] == len(launched)
        skipped.append(len(launched) < len(model.reducer.buckets))
    assert skipped == [True, False, False, True, False]


# ---- uneven inputs


class WithBuffers(nn.Module):
    """A layer, batch norm, and a branch that is not always used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(16, 16), nn.BatchNorm1d(16)
        self.idle, self.last = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)))


class _After:
    name = "POST_FORWARD"


class _Before:
    name = "PRE_FORWARD"


def _average_buffers(state: None, buffers: dict[str, Tensor]) -> list[Any]:
    return [
        dist.all_reduce(buffer.div_(dist.get_world_size()), async_op=True).get_future()
        for buffer in buffers.values()
        if buffer.is_floating_point()
    ]


@on_ranks(3, timeout=100)
def test_uneven_inputs_with_every_option_and_buffer_hooks(rank):
    names = ("unused", "view", "static", "skipping", "static-skipping", "low-unused")
    for number, (name, location) in enumerate(itertools.product(names, (None, _Before, _After))):
        options = OPTIONS[name]
        by_world = bool(number % 2)
        if "static_graph" not in options:
            options = {**options, "find_unused_parameters": True}
        model = DistributedDataParallel(WithBuffers(), bucket_cap_mb=0.001, **options)
        model.schedule_comm_hook(1, None, default_hooks.allreduce_hook)
        if location is not None:
            model._register_buffer_comm_hook(None, _average_buffers, location)
        for epoch in range(2):  # in the second one other ranks run out of inputs first
            steps = [1, 2, 3][(rank + epoch) % 3]
            with model.join(divide_by_initial_world_size=by_world):
                for step in range(steps):
                    model.zero_grad()
                    with torch.no_grad():  # an evaluation among the steps
                        model(batch(50 + step, rank, 4, 16))
                    with model.no_sync():
                        loss_of(model(batch(100 + step, rank, 4, 16))).backward()
                    loss_of(model(batch(step, rank, 4, 16))).backward()
                    with torch.no_grad():
                        for parameter in model.parameters():
                            if parameter.grad is not None:
                                parameter -= 0.01 * parameter.grad
        assert equal_on_all_ranks(*model.parameters()), (name, location, by_world)
        assert model.reducer.launcher.step == 6


class _Maybe(nn.Module):
    """Uses its parameters, or none of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))

    def forward(self, x: Tensor, uses: bool) -> Tensor:
        y: Tensor = self.layers(x) if uses else x * 1.0
        return y


# A rank that uses no parameter; one without inputs in the first step; in the first four.
@pytest.mark.parametrize("steps", [[[4, 4]], [[1, 0], [4, 4]], [[4, 0], [4, 4]]])
@on_ranks(2, pg_timeout=5)
def test_a_rank_that_is_idle_at_first_rebuilds_with_the_others(rank, steps):
    model = DistributedDataParallel(_Maybe(), static_graph=True, bucket_cap_mb=0.001)
    for epoch, counts in enumerate(steps):
        with model.join():
            for step in range(counts[rank]):
                x = batch(10 * epoch + step, rank, 4, 16).requires_grad_()
                loss_of(model(x, uses=rank == 0 or len(steps) > 1)).backward()
    members = [index for bucket in model.reducer.buckets for index in bucket.members]
    assert equal_on_all_ranks(torch.tensor(members))
    assert len(steps) > 1 or equal_on_all_ranks(gradients(model))


# ---- other ranks


class Follows:
    """A hook's state that goes with its model to another process group."""

    def __init__(self) -> None:
        self.group: Any = None

    def change_group(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def hook(self, bucket: Any) -> Any:
        return default_hooks.allreduce_hook(self.group, bucket)


@pytest.mark.slow
@on_ranks(2, ignore_warnings=(".*full backward hook",))
def test_a_hook_follows_to_other_ranks_or_says_that_it_cannot(rank: int, world_size: int) -> None:
    alone = [dist.new_group([member]) for member in range(world_size)][rank]
    for hook, state in (
        (None, None),
        (Follows.hook, Follows()),
        (default_hooks.fp16_compress_hook, alone),
    ):
        module = mlp()
        _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})
        model = DistributedDataParallel(module, process_group=alone, bucket_cap_mb=0.001)
        if isinstance(state, Follows):
            state.group = alone
        if hook is not None:
            model.register_comm_hook(state, hook)
        model.timeline.every = 1
        loss_of(model(batch(0, 0, 4, 16))).backward()
        error = outcome(model._update_process_group, dist.group.WORLD)
        if state is alone:
            assert error is not None
            assert "fp16_compress_hook" in error[1]
            assert "remove_comm_hook()" in error[1]
            model.remove_comm_hook()
            model._update_process_group(dist.group.WORLD)
        else:
            assert error is None
        assert model.timeline.every == 1
        loss_of(model(batch(1, rank, 4, 16))).backward()
        assert equal_on_all_ranks(*model.parameters())
        assert not torch.equal(parameters(model), parameters(mlp()))
        assert all(parameter.grad is None for parameter in model.parameters())  # it has stepped
