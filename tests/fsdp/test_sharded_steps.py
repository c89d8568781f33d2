"""FSDP models that accumulate, recompute, raise or reduce twice train rightly or raise an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    ShardingStrategy,
    fully_shard,
)
from torch.utils.checkpoint import checkpoint

import commhooks
from commhooks.errors import HookNotAttachedError, RegistrationError
from commhooks.fsdp import gather_parameters
from tests.fsdp.test_fsdp1 import QUIET
from tests.fsdp.test_fsdp2 import backward, equal, model_of, sharded, take_gradients
from tests.tools.harness import on_ranks
from tests.tools.models import Breaks
from tests.tools.training import averaged

# ---- models whose backward passes are not one bucket after the other


def _two_roots() -> nn.Module:
    """Two models of FSDP2, of which the first reduces after backward is said to have ended."""
    model, mesh = model_of(), init_device_mesh("cpu", (dist.get_world_size(),))
    parts = nn.Sequential(model[:2], model[2:])
    for part in parts:
        fully_shard(part, mesh=mesh)
    return parts


class _Twice(nn.Module):
    """Calls a layer twice."""

    def __init__(self, recomputes: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.recomputes = recomputes
        self.first, self.layer, self.last = nn.Linear(33, 64), nn.Linear(64, 64), nn.Linear(64, 7)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=True) if self.recomputes else self.layer(x)
            x = x.tanh()
        return self.last(x)  # type: ignore[no-any-return]


def _zeros_at_first() -> nn.Module:
    """After its first call in backward a layer has no gradient yet, and FSDP2 reduces zeros."""
    model, mesh = _Twice(), init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (*model.children(), model):
        fully_shard(layer, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_reduce_scatter_unused_params(True)
    return model


def _together() -> nn.Module:
    """Two layers in one group of parameters."""
    model, mesh = model_of(), init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard([model[2], model[4]], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _unsharded_root() -> nn.Module:
    """A model that was used before, and whose root has whole parameters since."""
    model, mesh = model_of(), init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model, mesh=mesh)
    with torch.no_grad():
        model(torch.ones(2, 33))
    return model


@pytest.mark.parametrize(
    ("build", "steps"),
    [(_two_roots, 3), (_zeros_at_first, 6), (_together, 3), (_unsharded_root, 3)],
)
@on_ranks(2)
def test_nothing_is_lost_or_sent_twice(
    rank: int, build: Callable[[], nn.Module], steps: int
) -> None:
    if build is _zeros_at_first and not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        return  # up to torch 2.11 FSDP2 reduces no zeros
    exact, ours = build(), build()
    hook = commhooks.register(ours, "int4", block=64)
    missing: dict[str, Tensor] = {}
    for step in range(3):
        for model in (exact, ours):
            backward(model, step, rank)
        average = take_gradients(ours)
        for name, wanted in take_gradients(exact).items():
            missing[name] = missing.get(name, torch.zeros_like(wanted)) + wanted - average[name]
    kept = hook.state_dict()[f"rank{rank}"]["memory"]["residual"]
    for name, value in missing.items():
        mean = averaged(kept[name])
        assert mean.any(), name
        assert float((value - mean).norm() / mean.norm()) < 1e-3
    buckets = {row.bucket for row in hook.ledger._rows}
    assert buckets == set(range(len(buckets))), "a group of parameters counts twice"
    assert hook.step == steps


needs_reset = pytest.mark.skipif(
    not hasattr(FSDPModule, "reset_iter_state"), reason="up to torch 2.11 a job ends there"
)


@needs_reset
@pytest.mark.parametrize("replicated", [False, True])
@on_ranks(2)
def test_a_pass_after_one_that_raised_needs_a_reset(rank: int, replicated: bool) -> None:
    results = []
    for fails in (False, True):
        model: Any = model_of()
        if replicated:
            hook = commhooks.fsdp.replicate(model, "int4", modules=[model[0], model[2]])
        else:
            hook = commhooks.register(sharded(model), "int4", block=64)
        backward(model, 0, rank)
        if fails:
            handle = model[2].register_forward_hook(lambda *given: Breaks.apply(given[2], True))
            with pytest.raises(ArithmeticError):
                backward(model, 9, rank)
            handle.remove()
            model.zero_grad()
            with pytest.raises(HookNotAttachedError, match=r"reset_iter_state\(\)"):
                backward(model, 1, rank)
            model.reset_iter_state()
        model.zero_grad()
        backward(model, 1, rank)
        results.append(take_gradients(model))
        assert hook.step == 2
    equal(*results)


@on_ranks(2, ignore_warnings=(".*",))
def test_a_compiled_model_counts_its_steps(rank: int) -> None:
    plain, ours = sharded(model_of()), sharded(model_of())
    hook = commhooks.register(ours, "none")
    compiled: Any = torch.compile(ours, backend="eager")
    for step in range(3):
        backward(plain, step, rank)
        backward(compiled, step, rank)
        equal(take_gradients(ours), take_gradients(plain))
    assert hook.step == 3


# ---- hooks that would not run


@on_ranks(2, ignore_warnings=QUIET)
def test_modules_that_are_sharded_after_register_are_missed(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    model = model_of()
    fully_shard(model[0], mesh=mesh)
    with pytest.warns(RuntimeWarning, match=r"2.weight, 2.bias, 4.weight and 1 more: in no FSDP2"):
        commhooks.register(model, "int8")
    fully_shard(model[2], mesh=mesh)
    fully_shard(model, mesh=mesh)
    for _ in range(2):
        with pytest.raises(HookNotAttachedError, match=r"root, 2: sharded after register"):
            backward(model, 0, rank)
    units = model_of()
    units[0] = _unit(units[0])
    commhooks.register(units, "int8")
    units[2] = _unit(units[2])
    with pytest.raises(HookNotAttachedError, match="on 2: sharded after register"):
        backward(units, 0, rank)


@on_ranks(4)
def test_the_divide_factor_stands_for_all_ranks_also_between_nodes(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    native, ours = sharded(model_of(), mesh), sharded(model_of(), mesh["shard"])
    commhooks.register(ours, "none", replicate_group=mesh["replicate"])
    results = []
    for model in (native, ours):
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(5.0)
                module.set_force_sum_reduction_for_comms(True)
        backward(model, 0, rank)
        results.append(take_gradients(model))
    equal(*results)


@on_ranks(2, ignore_warnings=QUIET)
def test_a_hook_switches_to_what_its_host_takes(rank: int) -> None:
    for model in (sharded(model_of()), _unit(model_of())):
        hook = commhooks.register(model, "int8")
        backward(model, 0, rank)
        with pytest.raises(
            RegistrationError, match=r"HookState.switch: PowerSGD\(.*\) averages whole"
        ):
            hook.switch("powersgd", rank=2)
        rules = [commhooks.Rule(commhooks.make("powersgd"), role="matrix")]
        with pytest.raises(
            RegistrationError, match=r"HookState.switch: PowerSGD\(.*\) averages whole"
        ):
            hook.switch(commhooks.PerParameter(rules, default=commhooks.make("int8")))
        with pytest.raises(RegistrationError, match="coalesce"):
            hook.switch("int8", coalesce=True)
        hook.switch("int4")
        backward(model, 1, rank)
        assert hook.step == 2


# ---- FSDP1


def _unit(module: nn.Module, **options: Any) -> nn.Module:
    return FullyShardedDataParallel(
        module, device_id=torch.device("cpu"), use_orig_params=True, **options
    )


@on_ranks(2, ignore_warnings=QUIET)
def test_a_unit_that_is_reduced_twice_loses_nothing(rank: int, world_size: int) -> None:
    models = [_Twice(recomputes=True) for _ in range(2)]
    for model in models:
        for name, layer in list(model.named_children()):
            setattr(model, name, _unit(layer))
    exact, ours = map(_unit, models)
    hook = commhooks.register(ours, "int4", block=64)
    missing = torch.zeros(())
    for step in range(3):
        flat = []
        for model in (exact, ours):
            backward(model, step, rank)
            unit = model.layer._handle.flat_param  # type: ignore[union-attr]
            flat.append(unit._saved_grad_shard if unit.grad is None else unit.grad)
        missing = missing + flat[0] - flat[1]
        for model in (exact, ours):
            model.zero_grad()
    parts = [torch.empty_like(missing) for _ in range(world_size)]
    dist.all_gather(parts, missing)
    kept = hook.state_dict()[f"rank{rank}"]["memory"]["residual"]
    mean = averaged(torch.cat([kept["layer.weight"].view(-1), kept["layer.bias"]]))
    assert float((torch.cat(parts) - mean).norm() / mean.norm()) < 1e-3
    assert hook.step == 6


@on_ranks(2, ignore_warnings=QUIET)
def test_units_that_are_not_sharded_beside_others_that_are(rank: int) -> None:
    results = []
    for hooked in (False, True):
        model = model_of()
        model[0] = _unit(model[0], sharding_strategy=ShardingStrategy.NO_SHARD)
        whole = _unit(model)
        if hooked:
            commhooks.register(whole, "none")
        backward(whole, 0, rank)
        results.append(
            [None if parameter.grad is None else parameter.grad for parameter in whole.parameters()]
        )
    for parameter, other in zip(*results, strict=True):
        assert (parameter is None) == (other is None)
        assert parameter is None or torch.equal(parameter, other)  # type: ignore[arg-type]


@on_ranks(4, ignore_warnings=QUIET)
def test_units_that_reduce_over_other_ranks_are_refused(rank: int) -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = model_of()
    model[0] = _unit(model[0], process_group=pairs[rank // 2])
    with pytest.raises(RegistrationError, match="different process groups"):
        commhooks.register(_unit(model), "int8")


# ---- gathered parameters


@on_ranks(2)
def test_parameters_that_are_gathered_ahead_are_waited_for() -> None:
    model = sharded(model_of((33, 650, 640, 7)))
    gather_parameters(model)
    exact = [parameter.full_tensor().detach() for parameter in model.parameters()]  # type: ignore[attr-defined]
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for handle in [module.unshard(async_op=True) for module in modules]:
        assert handle is not None
        handle.wait()
    for wanted, results in zip(exact, model.parameters(), strict=True):
        assert float((results.detach() - wanted).norm()) < 0.02 * float(wanted.norm())


@on_ranks(4)
def test_parameters_that_stay_on_a_part_of_the_ranks_have_the_same_bits(rank: int) -> None:
    models = []
    for after_forward in (True, 2):
        model = sharded(model_of(), reshard_after_forward=after_forward)
        gather_parameters(model)
        with pytest.raises(RegistrationError, match="already"):
            gather_parameters(model)
        models.append(model)
    for model in models:
        backward(model, 0, rank)
    equal(*map(take_gradients, models))


@on_ranks(3)
def test_bytes_are_compared_with_those_of_the_hosts_own_collective(
    rank: int, world_size: int
) -> None:
    model = sharded(model_of())
    hook = commhooks.register(model, "none")
    backward(model, 0, rank)
    rows = hook.report()
    rows = rows[rows.dense_bytes > 0]  # the last one is of the verdict, one number
    assert (rows.wire_bytes == rows.dense_wire_bytes).all()
    assert (rows.exposed_s > 0).all()
    assert "where an uncompressed reduce-scatter sends" in hook.summary()
    assert "as much" in hook.summary()
    collectives = commhooks.Collectives("none")
    whole = torch.ones(world_size, 1000)
    collectives.reduce_scatter(torch.empty(1000), whole)
    collectives.all_gather(whole, torch.ones(1000))
    calls = collectives.report()
    assert (calls.wire_bytes == calls.dense_wire_bytes).all()
