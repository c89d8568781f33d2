"""Events of a step's end of which the state of a communication hook is notified."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._composable import replicate
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

import commhooks
from commhooks.errors import RegistrationError
from ddp_core import DistributedDataParallel
from tests.tools.harness import on_ranks
from tests.tools.models import Breaks, loss_of
from tests.tools.training import averaged, batch, equal_on_all_ranks, gradients, mlp


class Recorder:
    """A hook's state: holds every bucket back until backward has ended, and writes events down."""

    def __init__(self) -> None:
        self.notifications: list[str] = []
        self.held: list[tuple[torch.futures.Future[Tensor], Tensor]] = []
        self.left_alone: list[nn.Parameter] = []

    def hook(self, bucket: Any) -> torch.futures.Future[Tensor]:
        self.notifications.append("bucket")
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        self.held.append((future, bucket.buffer()))
        return future

    def backward_finished(self) -> None:
        self.notifications.append("end")
        for future, buffer in self.held:
            future.set_result(averaged(buffer))
        self.held = []

    def gradients_written(self, left_alone: Sequence[nn.Parameter]) -> None:
        self.notifications.append("landed")
        self.left_alone = list(left_alone)

    def step_aborted(self) -> None:
        self.notifications.append("abandoned")
        for future, _ in self.held:
            future.set_exception(RuntimeError("abandoned"))
        self.held = []

    def take(self) -> list[str]:
        notifications, self.notifications = self.notifications, []
        return notifications


class Net(nn.Module):
    """Backward raises in the middle or after the last gradient; a branch may be left out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.idle, self.last = mlp(seed=1), nn.Linear(16, 16), mlp(seed=2)

    def forward(self, x: Tensor, breaks: str = "", idle: bool = False) -> Tensor:
        x = Breaks.apply(x, breaks == "after")
        x = Breaks.apply(self.first(x), breaks == "within")
        return self.last(x if idle else self.idle(x))


def recorded(**options: Any) -> tuple[DistributedDataParallel, Recorder]:
    model = DistributedDataParallel(Net(), **{"bucket_cap_mb": 0.002, **options})
    state = Recorder()
    model.register_comm_hook(state, Recorder.hook)
    return model, state


def one_step(model: nn.Module, step: int, rank: int, **inputs: Any) -> None:
    # An input that requires a gradient: backward goes on after the last parameter's gradient.
    loss_of(model(batch(step, rank, 4, 16).requires_grad_(), **inputs)).backward()


@pytest.mark.parametrize(
    "options",
    [{}, {"find_unused_parameters": True}, {"static_graph": True}],
    ids=["plain", "unused", "static"],
)
@on_ranks(2, ignore_warnings=("find_unused",))
def test_a_state_is_notified_whether_a_step_lands_or_is_abandoned(
    rank: int, options: dict[str, Any]
) -> None:
    model, state = recorded(**options)
    local = Net()
    for step in range(3):
        model.zero_grad()
        local.zero_grad()
        one_step(model, step, rank)
        one_step(local, step, rank)
        torch.testing.assert_close(gradients(model), averaged(gradients(local)))
        assert state.take() == ["bucket"] * len(model.reducer.buckets) + ["end", "landed"]
        assert state.left_alone == []
        with model.no_sync():
            one_step(model, step, rank)
        model.zero_grad()
        assert state.take() == []
        for breaks in ("within", "after"):
            with pytest.raises(ArithmeticError):
                one_step(model, step, rank, breaks=breaks)
            launched = state.take()
            assert set(launched) <= {"bucket"}
            assert len(launched) < len(model.reducer.buckets) or breaks == "after" or not step
            model.zero_grad()
            one_step(model, step, rank)
            notifications = state.take()
            assert notifications[0] == "abandoned", notifications
            assert notifications[1:] == ["bucket"] * len(model.reducer.buckets) + ["end", "landed"]
    with pytest.raises(ArithmeticError):
        one_step(model, 9, rank, breaks="after")
    state.take()
    model.remove_comm_hook()  # a raised step does not stand in the way, and its state is notified
    assert state.take() == ["abandoned"]
    model.zero_grad()
    one_step(model, 2, rank)
    torch.testing.assert_close(gradients(model), averaged(gradients(local)))
    assert state.take() == []


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("view", [False, True])
@on_ranks(2, ignore_warnings=(".*full backward hook",))
def test_a_state_is_notified_which_gradients_were_not_written(
    rank: int, view: bool, in_backward: bool
) -> None:
    model, state = recorded(find_unused_parameters=True, gradient_as_bucket_view=view)
    idle = list(model.module.idle.parameters())
    if in_backward:
        _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    one_step(model, 0, rank, idle=rank == 1)
    assert state.left_alone == []  # rank 0 uses it
    one_step(model, 1, rank, idle=True)
    # A gradient that is the bucket's view is overwritten with the bucket.
    assert set(state.left_alone) == (set() if view and not in_backward else set(idle))
    model.zero_grad()
    one_step(model, 2, rank, idle=True)
    assert set(state.left_alone) == set(idle)
    assert all(parameter.grad is None for parameter in idle)
    state.take()
    with model.join():
        for step in range(1 + 2 * rank):
            model.zero_grad()
            one_step(model, step, rank, idle=True)
    assert state.take() == 3 * (["bucket"] * len(model.reducer.buckets) + ["end", "landed"])
    assert set(state.left_alone) == set(idle)


@pytest.mark.parametrize("view", [False, True])
@on_ranks(2)
def test_a_rank_without_inputs_keeps_what_nobody_applies(rank: int, view: bool) -> None:
    model = DistributedDataParallel(
        Net(), find_unused_parameters=True, gradient_as_bucket_view=view
    )
    hook = commhooks.register(model, "powersgd", rank=1)

    def kept() -> list[Tensor]:
        return [hook.residual(f"idle.{name}") for name, _ in model.module.idle.named_parameters()]

    with model.join():
        one_step(model, 0, rank)  # gradients stay, on the rank that ends here
        before = kept()
        for step in range(1, 1 + 2 * rank):
            model.zero_grad()
            one_step(model, step, rank, idle=True)
    assert hook.step == 3
    assert all(map(torch.equal, kept(), before)), "counts as sent, was not applied"


@on_ranks(2)
def test_torchs_join_with_unused_parameters_and_memory_is_refused(rank: int) -> None:
    model = TorchDDP(Net(), find_unused_parameters=True)
    commhooks.register(model, "topk", ratio=0.1)
    unaware = "a rank without inputs does not learn which parameters no rank has used"
    with pytest.raises(RegistrationError, match=unaware), model.join():
        one_step(model, 0, rank)


@on_ranks(2)
def test_torchs_join_with_unused_parameters_and_verification_in_one_group_is_refused(
    rank: int,
) -> None:
    with mock.patch("commhooks.verify._verification.is_gloo", return_value=False):
        model = TorchDDP(Net(), find_unused_parameters=True)
        hook = commhooks.register(model, "int8", verify=1)
    with pytest.raises(RegistrationError, match="in another order"), model.join():
        one_step(model, 0, rank)
    hook.close()


@pytest.mark.parametrize("how", ["torch", "core", "replicate"])
@on_ranks(2)
def test_a_state_of_the_inner_module_keeps_what_nobody_applies(rank: int, how: str) -> None:
    """The hook's state knows the inner module only; a DistributedDataParallel calls it."""
    net = Net()
    if how == "replicate":
        model = replicate(net, find_unused_parameters=True)
    else:
        model = {"torch": TorchDDP, "core": DistributedDataParallel}[how](
            net, find_unused_parameters=True
        )
    hook = commhooks.HookState("powersgd", net, rank=1)
    model.register_comm_hook(hook, commhooks.comm_hook)
    one_step(model, 0, rank)
    kept = hook.residual("idle.weight")
    assert kept.any()
    for step in range(1, 3):
        net.zero_grad()
        one_step(model, step, rank, idle=True)
    assert torch.equal(hook.residual("idle.weight"), kept)


@on_ranks(2)
def test_a_step_that_fails_at_its_end_is_abandoned(rank: int) -> None:
    model, state = recorded()
    good = state.backward_finished

    def bad() -> None:
        raise ArithmeticError("on purpose")

    model.remove_comm_hook()
    state.backward_finished = bad  # type: ignore[method-assign]
    model.register_comm_hook(state, Recorder.hook)
    with pytest.raises(Exception, match="on purpose"):
        one_step(model, 0, rank)
    assert state.take()[-1] == "abandoned"
    state.backward_finished = good  # type: ignore[method-assign]
    model.replace_comm_hook(state, Recorder.hook)
    model.zero_grad()
    one_step(model, 1, rank)
    assert state.take()[-2:] == ["end", "landed"]
    model.zero_grad()
    one_step(model, 1, rank, idle=True)  # without find_unused_parameters
    assert "landed" not in state.take()
    with contextlib.suppress(RuntimeError):
        one_step(model, 2, rank)
    assert state.take() == ["abandoned"]


def delayed_in(module: nn.Module, prefix: str = "2.") -> dict[str, Any]:
    """Options that delay the all-reduce of a layer."""
    named = [(name, p) for name, p in module.named_parameters() if name.startswith(prefix)]
    return {"delay_all_reduce_named_params": named, "param_to_hook_all_reduce": named[0][1]}


@on_ranks(1)
def test_delayed_parameters_that_step_in_backward_or_join_are_refused() -> None:
    module = mlp()
    model = DistributedDataParallel(module, **delayed_in(module))
    with pytest.raises(RuntimeError, match="delay_all_reduce_named_params"), model.join():
        pass
    module = mlp()
    _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})
    with pytest.raises(ValueError, match=r"delay_all_reduce.*2.weight, 2.bias run in backward"):
        DistributedDataParallel(module, **delayed_in(module))


DELAYED = ["", "compiled", "replaced", "evaluated", "zeroed", "create_graph", "recomputed", "all"]


@pytest.mark.parametrize("how", DELAYED)
@on_ranks(2, ignore_warnings=(".*create_graph=True",))
def test_delayed_parameters_are_averaged(rank: int, how: str) -> None:
    module, local = mlp(), mlp()
    prefix = "" if how == "all" else "2."
    delayed = [(name, p) for name, p in module.named_parameters() if name.startswith(prefix)]
    model = DistributedDataParallel(
        module,
        delay_all_reduce_named_params=delayed,
        param_to_hook_all_reduce=module[2].bias if how == "recomputed" else module[0].weight,
    )
    if how == "recomputed":  # the trigger's gradient comes in an inner backward pass
        inner = module[2].forward
        module[2].forward = lambda x: checkpoint(inner, x, use_reentrant=True)
    if how in ("evaluated", "all"):
        model = copy.deepcopy(model)
    call = torch.compile(model, backend="aot_eager") if how == "compiled" else model
    for step in range(3):
        model.zero_grad()
        local.zero_grad()
        if how == "replaced":
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
        output = call(batch(step, rank, 4, 16))
        if how == "evaluated":
            with torch.no_grad():
                model(batch(step, rank, 4, 16))
        if how == "zeroed":
            model.zero_grad()
        loss_of(output).backward(create_graph=how == "create_graph")
        loss_of(local(batch(step, rank, 4, 16))).backward()
        torch.testing.assert_close(gradients(model).detach(), averaged(gradients(local)))


class Recomputes(nn.Module):
    """A part is recomputed in an inner backward pass; the outer one raises afterwards, if told."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.inner, self.last = mlp(seed=1), mlp(seed=2), nn.Linear(16, 16)

    def forward(self, x: Tensor, breaks: bool = False) -> Tensor:
        x = Breaks.apply(self.first(x), breaks)
        return self.last(checkpoint(self.inner, x, use_reentrant=True))


@on_ranks(2)
def test_a_step_that_raises_after_an_inner_pass_is_no_step_on_any_rank(rank: int) -> None:
    model = DistributedDataParallel(Recomputes(), bucket_cap_mb=0.002)
    hook = commhooks.register(model, "random_k", ratio=0.5)
    counts = []
    for step in range(9):
        model.zero_grad()
        breaks = step % 3 == 1
        with pytest.raises(ArithmeticError) if breaks else contextlib.nullcontext():
            loss_of(model(batch(step, rank, 4, 16).requires_grad_(), breaks)).backward()
        if rank == 1:
            time.sleep(0.05)  # here the exchanges are over at the next forward pass
        counts.append(hook.step)
    assert counts == [1, 1, 2, 3, 3, 4, 5, 5, 6]
    assert equal_on_all_ranks(gradients(model))
