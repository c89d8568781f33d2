"""Steps that raise on torch's class, and steps of hosts whose parameters have no gradients.

That what was applied and what is held back sum to the gradients, and that steps are counted as a
user counts them, is shown for all modes of both classes in ``tests/fuzz/test_modes.py``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import commhooks
from tests.tools.harness import on_ranks
from tests.tools.models import Breaks
from tests.tools.training import averaged, batch, ddp, gradients, mlp, residuals


@on_ranks(2)
def test_torchs_class_refuses_to_go_on_and_the_state_can_be_saved(rank: int) -> None:
    model, reference = ddp(mlp()), mlp()
    hook = commhooks.register(model, "topk", ratio=0.1)
    applied = total = torch.zeros(1, dtype=torch.float64)
    for step in range(2):
        for trained in (model, reference):
            trained.zero_grad()
            trained(batch(step, rank, 4, 16)).square().sum().backward()
        applied, total = applied + gradients(model), total + averaged(gradients(reference))
    handle = model.module[2].register_forward_hook(lambda *given: Breaks.apply(given[2], True))
    with pytest.raises(ArithmeticError):
        model(batch(2, rank, 4, 16)).sum().backward()
    handle.remove()
    hook.state_dict()  # the step is known to be over
    with pytest.raises(RuntimeError, match="Expected to have finished reduction in the prior"):
        model(batch(3, rank, 4, 16))
    missing = applied + averaged(residuals(hook, model)) - total
    assert hook.step == 2
    assert missing.norm() / total.norm() < 1e-5
    hook.close()


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
