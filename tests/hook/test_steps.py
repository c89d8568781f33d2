"""A step is one synchronised backward pass, whatever DistributedDataParallel makes of it.

In every scenario what was applied and what is held back sum to the gradients, and steps are counted
as a user counts them; with torch's class and with ours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import commhooks
import ddp_core
from tests.tools.harness import on_ranks
from tests.tools.models import Breaks
from tests.tools.training import averaged, batch, gradients, outcome, residuals

CLASSES = {"torch": DistributedDataParallel, "ours": ddp_core.DistributedDataParallel}
CAP_MB = 1.2 / 1024  # one weight of 16 x 16 a bucket


class Net(nn.Module):
    """Four layers: the first and the third can be left out, the last is of another dtype."""

    def __init__(self, dtype: torch.dtype = torch.float32, reentrant: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.front, self.first, self.idle = (nn.Linear(16, 16) for _ in range(3))
        self.last = nn.Linear(16, 16).to(dtype)
        self.reentrant = reentrant

    def forward(self, x: Tensor, front: bool = True, idle: bool = True, breaks: str = "") -> Tensor:
        x = Breaks.apply(x.requires_grad_(), breaks == "after")
        x = self.front(x) if front else x
        x = Breaks.apply(self.run(self.first, x).tanh(), breaks == "within")
        x = self.run(self.idle, x).tanh() if idle else x
        return self.last(x.to(self.last.weight.dtype))

    def run(self, layer: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(layer, x, use_reentrant=True) if self.reentrant else layer(x)


Inputs = Callable[[int], dict[str, Any]]  # arguments of the forward pass, by step
SCENARIOS: dict[str, tuple[dict[str, Any], dict[str, Any], Inputs]] = {
    # options of the class, of the model, of each step
    "plain": ({}, {}, lambda _: {}),
    "idle": ({"find_unused_parameters": True}, {}, lambda step: {"idle": step % 3 == 0}),
    "idle_view": (
        {"find_unused_parameters": True, "gradient_as_bucket_view": True},
        {},
        lambda step: {"idle": step % 3 == 0},
    ),
    "last_bucket_skipped": (
        {"find_unused_parameters": True, "skip_all_reduce_unused_params": True},
        {},
        lambda step: {"front": step % 3 == 0},
    ),
    "first_bucket_skipped": (
        {"find_unused_parameters": True, "skip_all_reduce_unused_params": True},
        {},
        lambda step: {"idle": step % 3 == 0},
    ),
    "static_graph": ({"static_graph": True}, {}, lambda _: {}),
    "static_graph_of_two_dtypes": ({"static_graph": True}, {"dtype": torch.float64}, lambda _: {}),
    "static_graph_idle": ({"static_graph": True}, {}, lambda _: {"idle": False}),
    "inner_backward": ({"static_graph": True}, {"reentrant": True}, lambda _: {}),
    "inner_backward_first": ({}, {"reentrant": True}, lambda _: {}),
}
SCHEMES: dict[str, dict[str, Any]] = {
    "onebit": {"block": 64},
    "topk": {"ratio": 0.1, "coalesce": True},
    "powersgd": {"rank": 2},
}


def _train(
    rank: int, cls: str, scheme: str, scenario: str, *, zero: bool = False
) -> tuple[int, Tensor]:
    """Steps counted, and what the law is off by, relative to the sum of gradients."""
    options, of_model, of_step = SCENARIOS[scenario]
    reference, module = Net(**of_model), Net(**of_model)
    model = CLASSES[cls](module, bucket_cap_mb=CAP_MB, **options)
    hook = commhooks.register(model, scheme, **SCHEMES[scheme])
    applied = total = torch.zeros(1, dtype=torch.float64)
    for step in range(7):
        for trained in (model, reference):
            trained.zero_grad(set_to_none=not zero)
            trained(batch(step, rank, 4, 16), **of_step(step)).square().sum().backward()
        applied = applied + gradients(model)
        total = total + averaged(gradients(reference))
    missing = applied + averaged(residuals(hook, model)) - total
    hook.close()
    return hook.step, missing.norm() / total.norm()


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("scheme", SCHEMES)
@on_ranks(2, timeout=90, ignore_warnings=(".*find_unused_parameters.*",))
def test_applied_and_residual_sum_to_the_gradients_of_the_steps_counted(
    rank: int, cls: str, scheme: str
) -> None:
    # Gradients of zeros instead of none: what is left alone is told by what was written.
    zeroed = [(name, True) for name in ("idle", "idle_view")]
    for name, zero in [*((name, False) for name in SCENARIOS), *zeroed]:
        steps, missing = _train(rank, cls, scheme, name, zero=zero)
        assert steps == 7, name
        assert missing < 1e-5, name  # sums of float32 over seven steps


def _abandons(rank: int, cls: str, scheme: str) -> Any:
    """Two steps, one that raises, two steps; ours goes on, torch's next forward says why not."""
    model = CLASSES[cls](Net(), bucket_cap_mb=CAP_MB)
    hook = commhooks.register(model, scheme, **SCHEMES[scheme])
    reference = Net()
    applied = total = torch.zeros(1, dtype=torch.float64)
    seen = []
    for step, breaks in enumerate(["", "", "within", "", "after", "", ""]):
        model.zero_grad(), reference.zero_grad()
        x = batch(step, rank, 4, 16)
        if breaks:
            error = outcome(lambda: model(x, breaks=breaks).sum().backward())  # noqa: B023
            hook.state_dict()  # the step is known to be over
            seen.append(error[0] if error else None)
            continue
        error = outcome(lambda: model(x).square().sum().backward())  # noqa: B023
        if error is not None:
            seen.append(error[1])
            break
        reference(x).square().sum().backward()
        applied, total = applied + gradients(model), total + averaged(gradients(reference))
    missing = (applied + averaged(residuals(hook, model)) - total).norm() / total.norm()
    hook.close()
    return hook.step, seen, missing


@pytest.mark.parametrize("scheme", SCHEMES)
@on_ranks(2)
def test_a_step_whose_backward_raised_is_dropped(rank: int, scheme: str) -> None:
    steps, seen, missing = _abandons(rank, "ours", scheme)
    assert seen == ["ArithmeticError", "ArithmeticError"]
    assert steps == 5
    assert missing < 1e-5


@on_ranks(2)
def test_torchs_class_refuses_to_go_on_and_the_state_can_be_saved(rank: int) -> None:
    steps, seen, missing = _abandons(rank, "torch", "topk")
    assert seen[0] == "ArithmeticError"
    assert "Expected to have finished reduction in the prior iteration" in seen[1]
    assert steps == 2
    assert missing < 1e-5


@on_ranks(2)
def test_a_model_that_moves_to_another_group_without_its_hook_is_an_error(rank: int) -> None:
    model = CLASSES["torch"](Net())
    hook = commhooks.register(model, "int8")
    model(batch(0, rank, 4, 16)).sum().backward()
    model._update_process_group(dist.new_group([0, 1]))
    error = outcome(lambda: model(batch(1, rank, 4, 16)).sum().backward())
    hook.close()
    assert error is not None
    assert "another process group" in error[1]
    dist.barrier()  # nobody ends while another still connects


class _Piece:
    """A bucket of a host that is no DistributedDataParallel: a shard, say."""

    def __init__(self, number: int, buffer: Tensor, parameter: nn.Parameter, *, last: bool) -> None:
        self._number, self._buffer, self._parameter, self._last = number, buffer, parameter, last

    def index(self) -> int:
        return self._number

    def buffer(self) -> Tensor:
        return self._buffer

    def parameters(self) -> list[nn.Parameter]:
        return [self._parameter]

    def is_last(self) -> bool:
        return self._last


class _InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Any) -> Tensor:
        ctx.call = call
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.call()
        return grad, None


@pytest.mark.parametrize("inside", [False, True])
@on_ranks(2)
def test_a_host_whose_parameters_have_no_gradients_keeps_its_residuals(
    rank: int, inside: bool
) -> None:
    shards = nn.Module()
    shards.a, shards.b = nn.Parameter(torch.empty(40, 30)), nn.Parameter(torch.empty(50))
    state = commhooks.HookState("topk", shards, ratio=0.05)
    applied, wanted = torch.zeros(1250), torch.zeros(1250)
    draw = torch.Generator().manual_seed(rank)

    def exchange() -> None:
        nonlocal applied, wanted
        parts, means = [], []
        for number, parameter in enumerate(shards.parameters()):
            parts.append(torch.randn(parameter.numel(), generator=draw))
            piece = _Piece(number, parts[-1].clone(), parameter, last=number == 1)
            means.append(state.start(piece).wait())
        wanted = wanted + averaged(torch.cat(parts))
        applied = applied + torch.cat(means)

    for _ in range(6):
        if inside:
            _InBackward.apply(torch.ones(1, requires_grad=True), exchange).sum().backward()
        else:
            exchange()
    left = averaged(torch.cat([state.residual(name).flatten() for name in "ab"]))
    assert state.step == 6
    torch.testing.assert_close(applied + left, wanted, rtol=1e-4, atol=1e-5)
