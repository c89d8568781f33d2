"""A living hook goes on with other ranks: what it keeps, who joins, who is lost, what is left."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import commhooks
import ddp_core
from commhooks.checkpoint._ranks import resizes_of
from commhooks.errors import MismatchError, RegistrationError
from ddp_core import AllReduce, Lanes, Task
from ddp_core.exchange._lane_groups import _pools
from tests.tools.harness import Died, on_ranks, run_ranks
from tests.tools.training import (
    assert_sums_close,
    batch,
    equal_bits,
    equal_on_all_ranks,
    everyone,
    flat,
    gradients,
    mlp,
    outcome,
    residuals,
)

CLASSES = {"torch": DistributedDataParallel, "core": ddp_core.DistributedDataParallel}
TINY = 1.5 / 1024  # MiB: several buckets
# At least one scheme for each thing that becomes of a slot: "sum", "same", "mean", "drop", none.
SCHEMES: dict[str, tuple[Any, dict[str, Any]]] = {
    "int8": ("int8", {}),
    "topk": ("topk", {"ratio": 0.2}),
    "powersgd": ("powersgd", {"rank": 1}),
    "acpsgd": ("acpsgd", {"rank": 1}),
    "ef21": (commhooks.wrappers.EF21(commhooks.schemes.TopK(0.2), momentum=0.5), {}),
    "dgc": ("dgc", {"ratio": 0.2}),
    "demo": ("demo", {}),
    "gossip": ("gossip", {}),
    "sdp4bit": ("sdp4bit", {"local_size": 2, "inside_block": 64, "between_block": 64}),
    "onebit_adam": ("onebit_adam", {"freeze_step": 1, "block": 64}),
}


def group_of(*ranks: int) -> Any:
    """A group of some ranks, which the others need not know of.

    Torch names it by its ranks and the number of groups that a rank has: all have made as many.
    """
    return dist.new_group(list(ranks), use_local_synchronization=True)


def wrapped(host: str, group: Any, **options: Any) -> Any:
    return CLASSES[host](mlp(), process_group=group, bucket_cap_mb=TINY, **options)


def step(model: nn.Module, number: int, rank: int) -> Tensor:
    """Runs a step; returns the local gradients. Averaged ones are in ``.grad``."""
    alone = mlp()
    alone.load_state_dict(model.module.state_dict())
    for value in (alone, model):
        value.zero_grad()
        value(batch(number, rank, 4, 16)).square().sum().backward()
    return gradients(alone)


def mean_over(group: Any, tensor: Tensor, size: int | None = None) -> Tensor:
    total = tensor.clone()
    dist.all_reduce(total, group=group)
    return total / (size or group.size())


def kept(hook: commhooks.HookState, group: Any) -> list[dict[str, dict[str, Tensor]]]:
    """Returns the memory of each rank, by key and parameter."""
    local: dict[str, dict[str, Tensor]] = {}
    for key, name, value in hook.engine.memory.items():
        local.setdefault(key, {})[name] = value.clone()
    return everyone(local, group)


def share_model(model: nn.Module, group: Any, source: int) -> None:
    for value in model.module.state_dict().values():
        dist.broadcast(value, group=group, group_src=source)


def carried_over(
    before: list[Any], after: list[Any], resizes: dict[str, str], joined: tuple[int, ...]
) -> None:
    """Checks what became of every slot. ``before``: of those that go on, and of no others."""
    stayed = [rank for rank in range(len(after)) if rank not in joined]
    for key in sorted({key for value in before for key in value}):
        for name in sorted({name for value in before for name in value.get(key, {})}):
            old = [value[key][name].double() for value in before if name in value.get(key, {})]
            new = [value.get(key, {}).get(name) for value in after]
            resize = resizes.get(key, "same")
            if resize == "drop":
                assert new == [None] * len(after)
            elif resize == "same":
                assert all(torch.equal(value.double(), old[0]) for value in new), key
            elif resize == "mean":
                mean = sum(old) / len(old)
                for element in new:
                    assert_sums_close(element.double(), mean, old)
            else:
                assert all(value is None for rank, value in enumerate(new) if rank in joined)
                total = sum(new[rank].double() for rank in stayed) / len(after)
                assert_sums_close(total, sum(old) / len(before), old)


# ---- 4, 2, 3 ranks


def _four_two_three(rank: int, host: str, name: str, verify: bool) -> None:
    scheme, options = SCHEMES[name]
    resizes = resizes_of(commhooks.make(scheme, **options))
    register = {**options, "verify": 1 if verify else None}
    model = wrapped(host, dist.group.WORLD)
    hook = commhooks.register(model, scheme, **register)
    seen: list[Tensor] = []

    def run_steps(group: Any, numbers: range) -> None:
        for number in numbers:
            held = mean_over(group, residuals(hook, model))
            local = step(model, number, rank)
            seen.append(gradients(model))
            if name in ("topk", "powersgd", "acpsgd"):
                # What is applied and what is held back is all there is.
                now = mean_over(group, residuals(hook, model))
                total = mean_over(group, local) + held
                torch.testing.assert_close(seen[-1] + now, total, rtol=1e-4, atol=1e-4)

    run_steps(dist.group.WORLD, range(3))
    # Four become two, which take over what the others keep by a state of all.
    before = kept(hook, dist.group.WORLD)
    state = hook.state_dict(gather=True)
    if rank in (1, 3):
        two = group_of(1, 3)
        change = hook.change_group(two)
        assert change[:4] == (3, 4, 2, 0), change
        assert (change.joined, change.stale_ranks, change.lost) == ((), (), 2)
        assert bool(change.dropped) == (name == "sdp4bit")
        hook.load_state_dict(state)
        assert (hook.rank, hook.world_size, hook.step) == (rank // 2, 2, 3)
        carried_over(before, kept(hook, two), resizes, ())
        run_steps(two, range(3, 6))
        before = kept(hook, two)
    # Two become three: rank 0 comes anew, with a model and a hook of its own.
    if rank == 0:
        model = wrapped(host, group_of(0))
        hook = commhooks.register(model, scheme, **register, seed=5)
    if rank == 2:
        return
    three = group_of(0, 1, 3)
    change = hook.change_group(three)
    assert change[:4] == (6, 2, 3, 1), change
    assert (change.joined, change.lost) == ((0,), 0)
    assert hook.engine.seed == 0
    carried_over(everyone(before, three)[1], kept(hook, three), resizes, (0,))
    share_model(model, three, change.source)
    del seen[:]
    run_steps(three, range(6, 9))
    assert hook.step == 9
    assert str(change).startswith("before step 6: 2 ranks became 3; joined: [0]")
    assert len(hook.group_changes) == (1 if rank == 0 else 2)
    assert equal_bits(everyone(torch.stack(seen), three)) or name == "gossip"  # each has its own
    hook.close()


@pytest.mark.parametrize("host", [pytest.param("torch", marks=pytest.mark.slow), "core"])
@on_ranks(4, timeout=120)
def test_four_ranks_become_two_and_then_three(rank: int, host: str) -> None:
    for name in SCHEMES if host == "torch" else ("topk", "powersgd", "ef21"):
        _four_two_three(rank, host, name, verify=False)
        dist.barrier()


@pytest.mark.parametrize("name", ["powersgd", "int8"])
@on_ranks(4, timeout=90)
def test_a_verified_run_goes_on_to_be_verified(rank: int, name: str) -> None:
    _four_two_three(rank, "torch", name, verify=True)


@on_ranks(2)
def test_a_residual_that_waits_to_be_sent_is_carried_over(rank: int) -> None:
    model = wrapped("core", dist.group.WORLD)
    hook = commhooks.register(model, "topk", ratio=0.2)
    step(model, 0, rank)
    hook.switch("none")
    before = residuals(hook, model)
    hook.change_group(group_of(rank))
    assert before.any()
    torch.testing.assert_close(residuals(hook, model), before / 2)  # the mean over ranks stays
    hook.close()


# ---- a rank dies


def _of_survivors(world: str, ranks: list[int], rank: int, directory: str) -> Any:
    """A group of those that are left; "anew": torch.distributed begins with them once more."""
    if world == "group":
        return group_of(*ranks)
    dist.destroy_process_group()
    store = dist.FileStore(os.path.join(directory, "again"), len(ranks))
    dist.init_process_group("gloo", store=store, rank=ranks.index(rank), world_size=len(ranks))
    return dist.group.WORLD


def _dies(
    rank: int, world_size: int, host: str, name: str, verify: bool, world: str, directory: str
) -> Any:
    scheme, options = SCHEMES[name]
    model = wrapped(host, dist.group.WORLD)
    if verify:
        options = {**options, "verify": 1}
    hook = commhooks.register(model, scheme, **options)
    for number in range(3):
        step(model, number, rank)
    before = kept(hook, dist.group.WORLD)
    if rank == 2:
        next(model.parameters()).register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
    error = outcome(step, model, 3, rank)
    assert error is not None
    # A rank whose neighbours in a ring are alive hears of it by the timeout only.
    survivors = _of_survivors(world, [0, 1, 3], rank, directory)
    dist.barrier(survivors)
    begin = time.monotonic()
    change = hook.change_group(survivors)
    assert change[:4] == (3, 4, 3, 0), change
    assert (change.joined, change.stale_ranks, change.lost) == ((), (), 1)
    assert "lost, with what they kept: 1" in str(change)
    assert time.monotonic() - begin < 3
    # The residuals of those that are left weigh what they did: 1 / 4 each.
    resizes = resizes_of(hook.scheme)
    after = kept(hook, survivors)
    for key, resize in resizes.items():
        for parameter in before[0].get(key, {}) if resize == "sum" else ():
            old = [before[value][key][parameter].double() for value in (0, 1, 3)]
            new = sum(value[key][parameter].double() for value in after) / 3
            assert_sums_close(new, sum(old) / 4, old)
    if name == "ef21":  # the estimates of those that are left have another mean
        for parameter, total in after[0]["ef21.total"].items():
            assert all(torch.equal(value["ef21.own"][parameter], total) for value in after)
    results = []
    for number in range(3, 6):
        held = mean_over(survivors, residuals(hook, model))
        local = step(model, number, rank)
        results.append(gradients(model))
        if name == "topk":
            now = mean_over(survivors, residuals(hook, model))
            total = mean_over(survivors, local) + held
            torch.testing.assert_close(results[-1] + now, total, rtol=1e-4, atol=1e-4)
    assert hook.step == 6
    lanes = [thread for thread in threading.enumerate() if thread.name == "commhooks-lanes"]
    end = time.monotonic() + 5  # what was under way with the dead rank fails by itself
    while len(lanes) > 1 and time.monotonic() < end:
        time.sleep(0.05)
        lanes = [thread for thread in threading.enumerate() if thread.name == "commhooks-lanes"]
    assert len(lanes) == 1
    hook.close()
    return results


@pytest.mark.parametrize("host", CLASSES)
@pytest.mark.parametrize(
    ("name", "verify", "world"),
    [("topk", False, "group"), ("powersgd", True, "anew"), ("ef21", False, "group")],
)
def test_ranks_go_on_without_one_that_died(
    name: str, verify: bool, world: str, host: str, tmp_path: Path
) -> None:
    results = run_ranks(
        _dies, 4, host, name, verify, world, str(tmp_path),
        may_die=[2], timeout=90, pg_timeout=5,
    )  # fmt: skip
    assert isinstance(results[2], Died)
    for grads in zip(results[0], results[1], results[3], strict=True):
        assert equal_bits(list(grads))


# ---- who goes on, and what is refused


@on_ranks(3)
def test_a_rank_that_was_away_for_a_change_joins_as_a_new_one(rank: int) -> None:
    model = wrapped("torch", dist.group.WORLD)
    hook = commhooks.register(model, "topk", ratio=0.2)
    step(model, 0, rank)
    if rank < 2:
        assert hook.change_group(group_of(0, 1)).lost == 1
        for number in range(1, 4):
            step(model, number, rank)
    else:
        group_of(2)
    everybody = group_of(0, 1, 2)
    change = hook.change_group(everybody)
    assert change.joined == (2,)
    share_model(model, everybody, change.source)
    assert residuals(hook, model).any() == (rank < 2)
    step(model, 4, rank)
    assert hook.step == 5
    assert equal_on_all_ranks(gradients(model))
    hook.close()


@on_ranks(3)
def test_a_rank_with_a_larger_step_joins_all_the_same(rank: int) -> None:
    model = wrapped("torch", group_of(2) if rank == 2 else group_of(0, 1))
    hook = commhooks.register(model, "topk", ratio=0.2)
    for number in range(2 if rank < 2 else 7):
        step(model, number, rank)
    assert hook.change_group(group_of(0, 1, 2))[:5] == (2, 2, 3, 0, (2,))
    assert residuals(hook, model).any() == (rank < 2)
    assert hook.report()["step"].max() == 1  # no rows of later steps of a rank that joins
    hook.close()


@pytest.mark.parametrize("host", CLASSES)
@on_ranks(2)
def test_what_cannot_change_says_why_and_stays_as_it_was(
    rank: int, world_size: int, host: str
) -> None:
    model = wrapped(host, dist.group.WORLD)
    hook = commhooks.register(model, "topk", ratio=0.2)
    step(model, 0, rank)
    other = group_of(*range(world_size))
    # Of another scheme: nothing is changed, on no rank.
    hidden = hook.engine.scheme
    if rank == 1:
        hook.engine.scheme = commhooks.make("topk", ratio=0.3)
    with pytest.raises(MismatchError, match=r"HookState\.change_group: scheme and options"):
        hook.change_group(other)
    hook.engine.scheme = hidden
    assert not hook.group_changes
    step(model, 1, rank)  # on the ranks before
    # Within a step.
    results = []
    last = next(iter(model.parameters()))
    handle = last.register_hook(lambda _: results.append(outcome(hook.change_group, other)))
    step(model, 2, rank)
    handle.remove()
    assert "between two steps" in results[0][1]


@pytest.mark.parametrize("explicit", [False, True])
@on_ranks(2)
def test_a_model_that_moved_alone_raises_until_its_hook_follows(rank: int, explicit: bool) -> None:
    model = wrapped("torch", dist.group.WORLD)
    group = dist.group.WORLD if explicit else None
    hook = commhooks.register(model, "topk", ratio=0.2, process_group=group)
    step(model, 0, rank)
    other = dist.new_group([0, 1])
    model._update_process_group(other)
    with pytest.raises(RegistrationError, match=r"hook\.change_group\(group\)"):
        step(model, 1, rank)
    hook.change_group(other)
    assert model.process_group is other
    step(model, 1, rank)
    assert hook.step == 2
    assert equal_on_all_ranks(gradients(model))
    hook.close()


# ---- what is left over


def _sockets() -> int:
    places = [f"/proc/self/fd/{path}" for path in os.listdir("/proc/self/fd")]
    return sum(
        os.path.exists(place) and os.readlink(place).startswith("socket") for place in places
    )


@on_ranks(2)
def test_nothing_of_the_groups_before_is_left(rank: int) -> None:
    model = wrapped("core", dist.group.WORLD)
    hook = commhooks.register(model, "powersgd", rank=1, verify=1)
    counts = []
    for number in range(6):
        group = dist.new_group([0, 1])
        before = model.process_group
        hook.change_group(group)
        if before is not dist.group.WORLD:
            dist.destroy_process_group(before)
        del before, group
        step(model, number, rank)
        dist.barrier()
        counts.append((_sockets(), threading.active_count(), len(_pools)))
    hook.close()
    assert len(set(counts[1:])) == 1, counts


def _two_sums(tensor: Tensor, fails: bool) -> Any:
    tensor = yield AllReduce(tensor, "sum")
    if fails:
        raise ArithmeticError
    return (yield AllReduce(tensor, "sum"))


def _gives_up(rank: int, world_size: int) -> Any:
    """Rank 1 does not come to the second round, and says nothing."""
    lanes = Lanes(dist.group.WORLD, rounds=2)
    task = Task(_two_sums(torch.ones(1), rank == 1), 0, 0, 4, world_size, 2)
    future = lanes.run(task)
    if rank == 1:
        assert outcome(future.wait) is not None
        time.sleep(6)
        lanes.abort()
        return None
    time.sleep(0.5)
    begin = time.monotonic()
    lanes.abort()
    seconds = time.monotonic() - begin
    error = outcome(future.wait)
    time.sleep(0.2)
    left = len(_pools[dist.group.WORLD].all)
    closed = outcome(lanes.run, task)
    threads = [value for value in threading.enumerate() if value.name.startswith("commhooks")]
    for thread in threads:
        thread.join(15)
    alive = [value.name for value in threads if value.is_alive()]
    del lanes, task, future
    return seconds, error, left, closed, alive, len(_pools[dist.group.WORLD].all)


def test_lanes_are_given_up_without_waiting_for_a_silent_rank() -> None:
    seconds, error, held, closed, alive, left = run_ranks(_gives_up, 2, pg_timeout=3)[0]
    assert seconds < 1
    assert "CollectiveError" in error[1] or error[0] == "CollectiveError"
    assert "its ranks have changed" in error[1]
    assert "lanes are closed" in closed[1]
    # Not dropped while a collective is under way: whoever does that waits for it.
    assert held == 1
    assert not alive
    assert left == 0


# ---- hooks with more than gradients


@on_ranks(3)
def test_diloco_takes_a_rank_in(rank: int) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    local = group_of(0, 1) if rank < 2 else group_of(2)
    outer = commhooks.DiLoCo(model, "topk", every=2, delay=1, ratio=0.3, process_group=local)

    def run_steps(numbers: range) -> None:
        for number in numbers:
            optimizer.zero_grad()
            model(batch(number, rank, 4, 16)).square().sum().backward()
            optimizer.step()
            outer.step()

    if rank < 2:
        run_steps(range(4))
        assert outer._pending  # what was sent to the ranks before is dropped
        with pytest.raises(RegistrationError, match=r"call DiLoCo\.change_group"):
            outer.hook.change_group(local)
    assert outer.change_group(group_of(0, 1, 2)).joined == (2,)
    assert (outer.steps, outer.outer_steps) == (4, 1)
    if rank == 2:  # it trains from there
        assert torch.equal(flat(model.parameters()), flat(outer._all_fragments()[0].outer))
    run_steps(range(4, 7))
    # Not the model: with a delay, each rank keeps a part of its own parameters.
    assert equal_on_all_ranks(*outer._all_fragments()[0].outer)
    outer.close()


@on_ranks(2)
def test_a_search_begins_anew_where_the_ranks_change(rank: int) -> None:
    model = wrapped("core", dist.group.WORLD)
    hook: Any = commhooks.register(model, "auto", measure_steps=1)
    step(model, 0, rank)
    assert hook.change_group(dist.new_group([0, 1])).step == 1
    assert not hook.decided
    step(model, 1, rank)
    hook.switch("int8")
    step(model, 2, rank)
    assert hook._trials._begun == 1
    assert equal_on_all_ranks(gradients(model))
    hook.close()


@pytest.mark.parametrize("name", ["random_k", "eden", "topk"])
@on_ranks(3)
def test_calls_of_ranks_that_join_are_counted_as_those_of_the_others(rank: int, name: str) -> None:
    """A rank that joins calls has made fewer of them; random positions go by their number."""
    options = {"ratio": 0.3} if name == "random_k" else {}
    group = group_of(0, 1) if rank < 2 else group_of(2)
    collectives = commhooks.Collectives(name, group, **options)
    tensor = torch.randn(500, generator=torch.Generator().manual_seed(rank))
    for _ in range(3 if rank < 2 else 1):
        collectives.all_reduce(tensor.clone(), "weight", op=dist.ReduceOp.AVG)
    assert dist.group.WORLD is not None
    collectives.change_group(dist.group.WORLD)
    for call in ("weight", "another"):
        collectives.all_reduce(mean := tensor.clone(), call, op=dist.ReduceOp.AVG)
        assert equal_on_all_ranks(mean)
    collectives.close()


def _after_a_call_that_failed(rank: int, world_size: int) -> Tensor | None:
    """Rank 2 does not come to a call, which the others give up to go on without it."""
    collectives = commhooks.Collectives("topk", ratio=0.3)
    tensor = torch.randn(500, generator=torch.Generator().manual_seed(rank))
    collectives.all_reduce(tensor.clone(), "weight", op=dist.ReduceOp.AVG)
    store: Any = dist.distributed_c10d._get_default_store()
    if rank == 2:
        store.wait(["0 has changed", "1 has changed"])
        return None
    handle = collectives.all_reduce(tensor.clone(), "weight", async_op=True)
    assert handle is not None
    collectives.change_group(group_of(0, 1))
    store.set(f"{rank} has changed", "")
    with pytest.raises(RuntimeError, match="was aborted: its ranks have changed"):
        handle.wait()
    for _ in range(2):  # of the same name
        collectives.all_reduce(mean := tensor.clone(), "weight", op=dist.ReduceOp.AVG)
    collectives.wait()
    collectives.close()
    return mean


def test_calls_that_failed_are_forgotten_where_the_ranks_change() -> None:
    *pair, _ = run_ranks(_after_a_call_that_failed, 3)
    assert equal_bits(pair)
