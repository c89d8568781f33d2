"""Schemes as the communication hook of FSDP1, in both of its signatures."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

import commhooks
from commhooks.errors import HookNotAttachedError, RegistrationError
from tests.fsdp.test_fsdp2 import backward, mean_residual, model_of, partly_frozen
from tests.tools.harness import on_ranks

QUIET = (".*FSDP", ".*deprecated", ".*NO_SHARD")


def unit(
    strategy: str, model: nn.Module | None = None, original: bool = True
) -> FullyShardedDataParallel:
    return FullyShardedDataParallel(
        model or model_of(),
        sharding_strategy=ShardingStrategy[strategy],
        device_id=torch.device("cpu"),
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        use_orig_params=original,
    )


def _flat(model: FullyShardedDataParallel) -> Tensor:
    units = FullyShardedDataParallel.fsdp_modules(model)
    flats: list[Any] = [unit._handle.flat_param for unit in units if unit._handle is not None]
    grads = [flat._saved_grad_shard if flat.grad is None else flat.grad for flat in flats]
    return torch.cat([grad.reshape(-1).float() for grad in grads])


def _error(ours: FullyShardedDataParallel, plain: FullyShardedDataParallel) -> float:
    """Relative distance of two models' gradients."""
    wanted = _flat(plain)
    return float((_flat(ours) - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@on_ranks(2, ignore_warnings=QUIET)
def test_the_mean_arrives(rank: int, strategy: str) -> None:
    for original, (name, most) in product((True, False), (("none", 0.0), ("int8", 0.02))):
        plain, ours = unit(strategy, original=original), unit(strategy, original=original)
        hook = commhooks.register(ours, name)
        for model in (plain, ours):
            backward(model, 0, rank)
        assert hook.step == 1
        assert {row.bucket for row in hook.ledger._rows} >= {0, 1, 2}
        assert _error(ours, plain) <= most


@on_ranks(2, ignore_warnings=QUIET)
def test_fsdp1s_own_call_takes_the_hooks_that_keep_nothing(rank: int) -> None:
    """FSDP1's own call, with the hooks that keep nothing; those that keep memory say what to do."""
    for strategy in ("FULL_SHARD", "NO_SHARD"):
        plain = unit(strategy)
        backward(plain, 0, rank)
        for hook, least, most in (
            (commhooks.allreduce_hook, 0.0, 0.0),
            (commhooks.fp16_compress_hook, 1e-6, 1e-3),
            (commhooks.bf16_compress_wrapper(commhooks.allreduce_hook), 1e-4, 1e-2),
            (commhooks.bf16_compress_wrapper(commhooks.fp16_compress_hook), 1e-4, 1e-2),
        ):
            ours = unit(strategy)
            ours.register_comm_hook(dist.group.WORLD, hook)
            backward(ours, 0, rank)
            assert least <= _error(ours, plain) <= most
    for state, refused in (
        (None, commhooks.allreduce_hook),
        (commhooks.PowerSGDState(None), commhooks.powerSGD_hook),
    ):
        ours = unit("NO_SHARD")
        ours.register_comm_hook(state, refused)
        with pytest.raises(
            RegistrationError, match=r"FSDP1 cannot run (allreduce|powerSGD)_hook with"
        ):
            backward(ours, 0, rank)


@on_ranks(2, ignore_warnings=QUIET)
def test_the_mean_arrives_of_a_scheme_that_keeps_some_and_of_rules(rank: int) -> None:
    for strategy in ("FULL_SHARD", "NO_SHARD"):
        plain, kept, chosen = (unit(strategy) for _ in range(3))
        commhooks.register(kept, "int4", block=64)
        rules = [commhooks.Rule(commhooks.make("int8"), name="*.weight", min_numel=100)]
        commhooks.register(chosen, commhooks.PerParameter(rules, default=commhooks.make("none")))
        for model in (plain, kept, chosen):
            backward(model, 0, rank)
        assert 0 < _error(kept, plain) < 0.4
        assert 0 < _error(chosen, plain) < 0.02
        exact = (_flat(chosen) == _flat(plain)).sum()
        dist.all_reduce(exact)
        biases = [value for name, value in model_of().named_parameters() if "bias" in name]
        assert exact >= sum(value.numel() for value in biases)


@on_ranks(2, ignore_warnings=QUIET)
def test_whole_gradients_have_no_padding(rank: int) -> None:
    """Three entries on two ranks, which nothing pads as nothing is cut."""
    model = FullyShardedDataParallel(
        nn.Linear(2, 1),
        sharding_strategy=ShardingStrategy.NO_SHARD,
        device_id=torch.device("cpu"),
        use_orig_params=False,
    )
    hook = commhooks.register(model, "topk", ratio=0.4)
    model(torch.ones(1, 2) * (rank + 1)).sum().backward()
    assert hook.step == 1


@on_ranks(2, ignore_warnings=QUIET)
def test_frozen_parameters_need_no_memory(rank: int) -> None:
    """One unit is frozen as a whole, one in part."""
    model = FullyShardedDataParallel(
        partly_frozen(),
        device_id=torch.device("cpu"),
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        use_orig_params=True,
    )
    hook = commhooks.register(model, "int4", block=64)
    ddp = DistributedDataParallel(partly_frozen())
    other = commhooks.register(ddp, "int4", block=64)
    backward(ddp, 0, rank)
    hook.load_state_dict(other.state_dict(gather=True))
    backward(model, 1, rank)
    state = hook.state_dict(gather=True)
    assert not any(name.startswith("0.") for name in state["rank0"]["memory"]["residual"])
    other.load_state_dict(state)
    assert other.step == 2


@on_ranks(2, ignore_warnings=QUIET)
def test_what_cannot_run_is_refused(rank: int) -> None:
    with pytest.raises(RegistrationError, match="averages whole buckets"):
        commhooks.register(unit("FULL_SHARD"), "powersgd")
    commhooks.register(unit("NO_SHARD"), "powersgd").call_monitor.suppressed = True
    model = unit("FULL_SHARD")
    commhooks.register(model, "int8").call_monitor.suppressed = True
    with pytest.raises(RegistrationError, match="already has a hook"):
        commhooks.register(model, "int8")
    with pytest.raises(RegistrationError, match="auto"):
        commhooks.register(unit("FULL_SHARD"), "auto")
    with pytest.raises(RegistrationError, match="for models of FSDP2"):
        commhooks.register(unit("FULL_SHARD"), "int8", replicate_group=dist.group.WORLD)
    alone = dist.new_group([rank], use_local_synchronization=True)
    groups: Any = (dist.group.WORLD, alone)
    hybrid = FullyShardedDataParallel(
        model_of(),
        groups,
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        device_id=torch.device("cpu"),
    )
    with pytest.raises(RegistrationError, match="HYBRID_SHARD"):
        commhooks.register(hybrid, "int8")
    units = FullyShardedDataParallel.fsdp_modules(model)
    units[-1]._comm_hook = None
    with pytest.raises(HookNotAttachedError, match=r"not run on 4: .*another reduction"):
        backward(model, 0, rank)
    units[-1]._comm_hook = lambda _state, _gradient, shard: shard.zero_()
    with pytest.raises(HookNotAttachedError, match=r"not run on 4: .*another reduction"):
        backward(model, 0, rank)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@on_ranks(2, ignore_warnings=QUIET)
def test_a_pass_after_one_that_raised_is_an_error(rank: int, strategy: str) -> None:
    model = unit(strategy)
    hook = commhooks.register(model, "int4", block=64)
    backward(model, 0, rank)

    def fail(gradient: Tensor) -> None:
        raise ValueError("planned")

    def forward(module: nn.Module, inputs: Any, output: Tensor) -> None:
        output.register_hook(fail)

    handle = next(iter(model.module.children())).register_forward_hook(forward)  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="planned"):
        backward(model, 9, rank)
    handle.remove()
    model.zero_grad()
    with pytest.raises(HookNotAttachedError, match="resume from a checkpoint"):
        backward(model, 1, rank)
    assert hook.step == 1


@on_ranks(2, ignore_warnings=QUIET)
def test_a_loss_beside_a_whole_unit_is_an_error(rank: int) -> None:
    """The parameters of a sharded one are flat pieces outside of it, which no layer takes."""
    for trained, text in (
        (False, "without a forward pass of FullyShardedDataParallel"),
        (True, "after this step's gradients were averaged"),
    ):
        model = unit("NO_SHARD")
        commhooks.register(model, "int8")
        if trained:
            with model.no_sync():
                backward(model, 0, rank)
            penalty = sum(value.square().sum() for value in model.parameters())
            (model(torch.randn(4, 33)).square().sum() + penalty).backward()
        layer = model.get_submodule("_fsdp_wrapped_module.0._fsdp_wrapped_module")
        loss = layer(torch.randn(4, 33)).square().sum()
        with pytest.raises(HookNotAttachedError, match=text):
            loss.backward()


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@on_ranks(2, ignore_warnings=QUIET)
def test_what_was_not_sent_of_a_parameter_that_is_frozen_stays(rank: int, strategy: str) -> None:
    model = unit(strategy)
    hook = commhooks.register(model, "int4", block=64)
    backward(model, 0, rank)
    before = hook.state_dict()[f"rank{rank}"]["memory"]["residual"]
    frozen = model.get_parameter("_fsdp_wrapped_module.0._fsdp_wrapped_module.weight")
    frozen.requires_grad_(False)
    for step in (1, 2):
        backward(model, step, rank)
    after = hook.state_dict()[f"rank{rank}"]["memory"]["residual"]
    assert before["0.weight"].any()
    for name, value in before.items():
        assert torch.equal(after[name], value) == (name == "0.weight" or not value.any()), name


@on_ranks(2, ignore_warnings=QUIET)
def test_values_of_channels_last_weights_are_saved_in_their_dimensions(rank: int) -> None:
    saved = []
    for order in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Conv2d(3, 5, (2, 3)), nn.Flatten(), nn.LazyLinear(4))
        inputs = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(rank))
        plain(inputs)
        plain.to(memory_format=order)
        device = torch.device("cpu")
        model = FullyShardedDataParallel(plain, device_id=device, use_orig_params=True)
        # Rounds every entry by itself, wherever it lies.
        hook = commhooks.register(model, "bf16", fp32_sum=True, error_feedback=True)
        for _ in range(2):
            model(inputs).square().sum().backward()
            model.zero_grad()
        saved.append(mean_residual(hook.state_dict(gather=True)))
    wanted, kept = saved
    assert wanted["0.weight"].shape == (5, 3, 2, 3)
    for name, value in wanted.items():
        assert (kept[name] - value).norm() < 0.1 * value.norm(), name


@on_ranks(2, ignore_warnings=QUIET)
def test_parameters_of_another_dtype_are_an_error_before_the_forward_pass(rank: int) -> None:
    for strategy in ("FULL_SHARD", "NO_SHARD"):
        for original in (True, False):
            model = unit(strategy, original=original)
            commhooks.register(model, "int8")
            backward(model, 0, rank)
            model.double()
            with pytest.raises(HookNotAttachedError, match=r"are of torch\.float64, and were"):
                backward(model, 1, rank)
