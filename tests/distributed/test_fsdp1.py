"""Schemes as the communication hook of FSDP1, in both of its signatures."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

import commhooks
from commhooks.errors import RegistrationError
from tests.distributed.harness import run_ranks
from tests.distributed.test_fsdp2 import backward, model_of

QUIET = (".*FSDP", ".*deprecated", ".*NO_SHARD")


def _unit(strategy: str, original: bool = True) -> FullyShardedDataParallel:
    return FullyShardedDataParallel(
        model_of(),
        sharding_strategy=ShardingStrategy[strategy],
        device_id=torch.device("cpu"),
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        use_orig_params=original,
    )


def _flat(model: FullyShardedDataParallel) -> Tensor:
    units = FullyShardedDataParallel.fsdp_modules(model)
    flats: list[Any] = [one._handle.flat_param for one in units if one._handle is not None]
    grads = [flat._saved_grad_shard if flat.grad is None else flat.grad for flat in flats]
    return torch.cat([grad.reshape(-1).float() for grad in grads])


def _matches(rank: int, world_size: int, strategy: str, name: str, original: bool) -> float:
    plain, ours = _unit(strategy, original), _unit(strategy, original)
    hook = commhooks.register(ours, name)
    for model in (plain, ours):
        backward(model, 0, rank)
    assert hook.step == 1
    wanted, found = _flat(plain), _flat(ours)
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.parametrize("original", [True, False])
def test_the_mean_arrives(strategy: str, original: bool) -> None:
    for name, most in (("none", 0.0), ("int8", 0.02)):
        ranks = run_ranks(_matches, 2, strategy, name, original, ignore_warnings=QUIET)
        assert max(ranks) <= most


def _run(rank: int, world_size: int, host: str, state: dict[str, Any] | None) -> dict[str, Any]:
    model: Any = DistributedDataParallel(model_of()) if host == "ddp" else _unit("FULL_SHARD")
    hook = commhooks.register(model, "int4", block=64)
    if state is not None:
        hook.load_state_dict(state)
        return hook.state_dict(gather=True)
    for step in range(2):
        backward(model, step, rank)
    return hook.state_dict(gather=True)


@pytest.mark.parametrize(("first", "second"), [("ddp", "fsdp1"), ("fsdp1", "ddp")])
def test_what_one_host_saves_another_loads(first: str, second: str) -> None:
    saved = run_ranks(_run, 3, first, None, ignore_warnings=QUIET)[0]
    loaded = run_ranks(_run, 3, second, saved, ignore_warnings=QUIET)[0]
    for key in ("rank0", "rank1", "rank2"):
        wanted, found = (
            {
                name: value
                for name, value in one[key]["memory"]["residual"].items()
                if "#" not in name
            }
            for one in (saved, loaded)
        )
        assert list(wanted) == list(found)
        for name, value in wanted.items():
            assert value.any()
            assert torch.equal(found[name], value)


def _refused(rank: int, world_size: int) -> None:
    with pytest.raises(RegistrationError, match="averages whole buckets"):
        commhooks.register(_unit("FULL_SHARD"), "powersgd")
    commhooks.register(_unit("NO_SHARD"), "powersgd")._attendance.excused = True
    model = _unit("FULL_SHARD")
    commhooks.register(model, "int8")._attendance.excused = True
    with pytest.raises(RegistrationError, match="already has a hook"):
        commhooks.register(model, "int8")
    with pytest.raises(RegistrationError, match="for models of FSDP2"):
        commhooks.register(_unit("FULL_SHARD"), "int8", between=dist.group.WORLD)


def test_what_cannot_run_is_refused() -> None:
    run_ranks(_refused, 2, ignore_warnings=QUIET)
