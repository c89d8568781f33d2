"""Groups of lanes: lent again and again, on all kinds of process groups, in real processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from packaging.version import Version

import commhooks
import ddp_core
from ddp_core import AllReduce, Lanes, Task
from ddp_core.exchange._lane_groups import _pools
from tests.tools.harness import on_ranks, run_ranks
from tests.tools.training import batch, equal_bits, equal_on_all_ranks, gradients, mlp, train

TINY = 0.2  # KiB a bucket: several buckets


def _hook_and_gradients(place, group, scheme, steps=2, **options):
    """Returns the hook, and the gradients of the last step."""
    model = ddp_core.DistributedDataParallel(
        mlp(), process_group=group, bucket_cap_mb=TINY / 1024, init_sync=False
    )
    hook = commhooks.register(model, scheme, **options)
    return hook, train(model, place, range(steps))[-1]


# ---- TORCH_DISTRIBUTED_DEBUG=DETAIL: a collective returns when all ranks have come to it

SCHEMES = {"powersgd": {"rank": 1}, "int8": {}, "sdp4bit": {"local_size": 2}, "topk": {}}


@on_ranks(2, pg_timeout=15)
def test_schemes_of_several_rounds_train_where_every_collective_is_checked(rank, world_size):
    results = {name: [] for name in SCHEMES}
    try:
        for level in (dist.DebugLevel.OFF, dist.DebugLevel.DETAIL):
            dist.set_debug_level(level)
            group = dist.new_group(list(range(world_size)))
            wrapper = type(group._get_backend(torch.device("cpu"))).__name__
            assert (wrapper == "_ProcessGroupWrapper") == (level == dist.DebugLevel.DETAIL)
            for name, options in SCHEMES.items():
                hook, grads = _hook_and_gradients(rank, group, name, 3, **options)
                hook.close()
                results[name].append(grads)
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)
    for name, grads in results.items():
        assert equal_bits(grads), name
        assert equal_on_all_ranks(*grads), name


# ---- again and again


def _again_and_again(rank, world_size, directory):
    names = {}

    def lanes(hook):
        return [lane.name for lane in hook.drivers._lanes._lane_groups]

    def group_of_two():
        groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        return groups[rank % 2]

    # Other groups of one rank's only: torch's own names for groups then differ. Torch 2.14 makes no
    # default group anew after that: its ranks wait for each other under different names.
    if rank == 0 and Version(torch.__version__) < Version("2.14"):
        dist.new_group([0], use_local_synchronization=True)
    kept = []
    for mode in ("close", "keep", "uneven"):
        group = group_of_two()
        for _ in range(3):
            hook, _ = _hook_and_gradients(rank, group, "int4", 1)
            names.setdefault(mode, []).append(lanes(hook)[0])
            if mode == "close" or (mode == "uneven" and rank >= 2):
                hook.close()
            kept.append(hook)
    for _ in range(2):
        group = group_of_two()
        _hook_and_gradients(rank, group, "int4", 1)[0].close()
        dist.destroy_process_group(group)
    dist.destroy_process_group()
    store = dist.FileStore(str(Path(directory, "again")), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    hook, grads = _hook_and_gradients(rank, None, "powersgd", 2)
    hook.close()
    return names, grads


def test_hooks_on_groups_of_some_ranks_come_and_go(tmp_path):
    results = run_ranks(_again_and_again, 4, str(tmp_path), timeout=100)
    assert equal_bits([grads for _, grads in results])
    for rank, (names, _) in enumerate(results):
        assert len(set(names["close"])) == 1
        assert len(set(names["keep"])) == len(set(names["uneven"])) == 3
        assert names == results[(rank + 2) % 4][0]
        assert names != results[(rank + 1) % 4][0]


# ---- what must not be lent again


def _sum(tensor):
    tensor = yield AllReduce(tensor, "sum")
    return (yield AllReduce(tensor, "sum"))


@pytest.mark.parametrize("how", ["failed", "no answer", "one more", "nothing"])
@on_ranks(2)
def test_a_group_with_something_left_over_on_one_rank_is_not_lent_again(rank, world_size, how):
    def run(lanes):
        return lanes.run(Task(_sum(torch.ones(1)), 0, 0, 4, world_size, 2))

    lanes = Lanes(dist.group.WORLD, rounds=2)
    first = lanes._lane_groups[0]
    run(lanes).wait()
    if rank == 0:
        first.issued += how == "no answer"
        first.unusable = how == "failed"
        if how == "one more":  # which the other rank has not asked for
            first.issued += 1
            first.completed += 1
    lanes.close()
    lanes = Lanes(dist.group.WORLD, rounds=2)
    assert float(run(lanes).wait()) == 4.0
    assert (lanes._lane_groups[0] is first) == (how == "nothing")
    assert len(_pools[dist.group.WORLD].all) == 1
    lanes.close()


# ---- a child of os.fork()

FORKS = """
import os, signal, sys, torch, torch.distributed as dist, commhooks, ddp_core

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = ddp_core.DistributedDataParallel(torch.nn.Linear(8, 8))
hook = commhooks.register(model, "powersgd")
group = commhooks.process_group("int8")

def step():
    model.zero_grad()
    model(torch.ones(2, 8)).sum().backward()
    return float(model.module.weight.grad.sum())

before = [step() for _ in range(3)]
if not (child := os.fork()):
    sys.exit(7)  # as one that ends normally: with finalizers
signal.alarm(30)  # nobody waits for a child that hangs
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), abs(step() - before[0]) < 0.01)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_child_of_fork_ends_and_its_parent_trains_on():
    done = subprocess.run(
        [sys.executable, "-c", FORKS],
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    assert done.stdout == "7 True\n"


# ---- groups that torch.distributed does not know


class Managed(dist.ProcessGroup):
    """Hands everything on to another group, as fault-tolerant wrappers do."""

    def __init__(self, group):
        super().__init__(group.rank(), group.size())
        self._group = group

    def allreduce(self, tensors, opts):
        return self._group.allreduce(tensors, opts)

    def allgather(self, outputs, inputs, opts):
        return self._group.allgather(outputs, inputs, opts)

    def getBackendName(self):
        return "managed"

    def size(self):
        return self._group.size()

    def rank(self):
        return self._group.rank()


@on_ranks(2)
def test_a_scheme_of_one_round_runs_on_a_group_that_torch_does_not_know(rank):
    group = Managed(dist.group.WORLD)
    model = ddp_core.DistributedDataParallel(mlp())
    commhooks.register(model, "fp16", process_group=group)
    model(batch(0, rank, 4, 16)).square().sum().backward()
    assert equal_on_all_ranks(gradients(model))
    model = ddp_core.DistributedDataParallel(mlp())
    with pytest.raises(RuntimeError, match=r"(?s)(?=.*several rounds)(?=.*Managed).*one round"):
        commhooks.register(model, "powersgd", process_group=group)
