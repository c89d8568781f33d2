"""Order of collectives, errors and teardown of lanes, in real processes."""

import gc
import os
import random
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commhooks
import ddp_core
from commhooks import Scheme
from commhooks.core import Result, Traits
from ddp_core import (
    AllReduce,
    Lanes,
    ReduceScatter,
    Streams,
    Task,
    group_timeout,
    overlapped,
)
from ddp_core.exchange._lane_groups import _pools
from ddp_core.exchange._shared_store import group_store
from tests.tools.harness import on_ranks, run_ranks
from tests.tools.training import (
    batch,
    ddp,
    equal_on_all_ranks,
    gradients,
    mlp,
    outcome,
    parameters,
    train,
)

BUCKETS = 36
TINY = 0.2  # KiB a bucket: less than any of the layers below, so each is a bucket of its own


@dataclass(frozen=True)
class Jitter(Scheme):
    """Another scheme, with random pauses before each of its requests, others on each rank."""

    scheme: Scheme
    share: float

    traits = Traits(rounds=2)

    def exchange(self, bucket):
        chance = random.Random(f"{bucket.rank}/{bucket.step}/{bucket.layout.names}")
        inner = self.scheme.exchange(bucket)
        answer = None
        while True:
            if chance.random() < self.share:
                time.sleep(chance.random() * 1e-3)
            try:
                request = next(inner) if answer is None else inner.send(answer)
            except StopIteration as stop:
                return stop.value
            answer = yield request


@dataclass(frozen=True)
class TwoRounds(Scheme):
    """Averages, then averages again; with one request too many or an exception if told so."""

    raise_in_bucket: int = -1
    extra_round: bool = False

    traits = Traits(rounds=2)

    def exchange(self, bucket):
        mean = yield AllReduce(bucket.gradient)
        number = int(bucket.layout.names[0].split(".")[0])
        if bucket.step == 1 and self.raise_in_bucket in (0, number):
            raise ValueError("this scheme cannot go on")
        mean = yield AllReduce(mean)
        if self.extra_round:
            mean = yield AllReduce(mean)
        return Result(mean)


def _layers(count=BUCKETS):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(count)))


def _pauses(model, rank):
    """Random pauses of this rank within backward."""
    chance = random.Random(rank)

    def pause(grad):
        if chance.random() < 0.01:
            time.sleep(chance.random() * 2e-3)

    for parameter in model.parameters():
        parameter.register_hook(pause)


# ---- order


def _delays(rank, world_size, steps):
    kind = DistributedDataParallel if world_size == 2 else ddp_core.DistributedDataParallel
    model = kind(_layers(), bucket_cap_mb=TINY / 1024)
    _pauses(model, rank)
    scheme = Jitter(commhooks.make("powersgd", rank=1), share=0.02)
    hook = commhooks.register(model, scheme)
    train(model, rank, range(steps), lr=0.005, width=8)
    rounds = {(row.bucket, row.round) for row in hook.ledger._rows if row.step == steps - 1}
    hook.close()
    assert len(rounds) == 2 * BUCKETS
    assert equal_on_all_ranks(parameters(model))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("world_size", "steps"), [(2, 500), (4, 500)])
def test_36_buckets_of_two_rounds_with_random_delays_finish_with_equal_bits(world_size, steps):
    run_ranks(_delays, world_size, steps, timeout=280)


def _average(tensor, rounds):
    for _ in range(rounds):
        tensor = yield AllReduce(tensor)
    return tensor


def _task(exchange, bucket, world_size, max_rounds):
    return Task(exchange, 0, bucket, 4, world_size, max_rounds)


# ---- work beside a collective


def _run_by(driver, task):
    """Runs a task to its end: on lanes, without their thread, or as a device's streams do."""
    if driver == "streams":
        return Streams(dist.group.WORLD).run(task, torch.device("cpu")).wait()
    lanes = Lanes(dist.group.WORLD, rounds=2)
    try:
        return (lanes.run_here if driver == "here" else lanes.run)(task).wait()
    finally:
        lanes.close()


DRIVERS = pytest.mark.parametrize("driver", ["lanes", "here", "streams"])


@DRIVERS
@on_ranks(2)
def test_work_is_done_while_the_collective_is_under_way(rank, world_size, driver):
    """Rank 1 begins each round when rank 0 has done its work beside the collective."""
    store, order = group_store(dist.group.WORLD), []

    def exchange():
        tensor = torch.tensor([float(rank)])
        for round in range(2):
            if rank:
                store.wait([f"{driver} {round}"], timedelta(seconds=20))

            def work(round=round):
                order.append(f"work {round}")
                store.set(f"{driver} {round}", "")

            tensor = yield from overlapped(AllReduce(tensor), work)
            order.append(f"result {round}")
        return tensor

    assert float(_run_by(driver, _task(exchange(), 0, world_size, 2))) == 0.5
    assert order == ["work 0", "result 0", "work 1", "result 1"]


@DRIVERS
@on_ranks(2)
def test_an_exchange_goes_on_when_its_work_is_done_too(world_size, driver):
    tensor, resumed = torch.ones(1), threading.Event()
    early = []

    def work():
        deadline = time.monotonic() + 20
        while float(tensor) == 1.0 and time.monotonic() < deadline:
            time.sleep(1e-3)
        early.append(resumed.wait(0.2))

    def exchange():
        sum_ = yield from overlapped(AllReduce(tensor, "sum"), work)
        resumed.set()
        return sum_

    assert float(_run_by(driver, _task(exchange(), 0, world_size, 1))) == 2.0
    assert early == [False]


@DRIVERS
@on_ranks(2)
def test_work_that_fails_is_a_failure_of_the_scheme(world_size, driver):
    def work():
        raise ValueError("no room")

    def exchange():
        return (yield from overlapped(AllReduce(torch.ones(1)), work))

    failed = (
        r"the scheme failed in step 0, bucket 3, round 0: ValueError: no room "
        r"\(test_lanes\.py:\d+ in work\)"
    )
    with pytest.raises(RuntimeError, match=failed):
        _run_by(driver, _task(exchange(), 3, world_size, 1))


@on_ranks(3)
def test_buckets_with_fewer_rounds_pass_their_turn(rank, world_size):
    rounds = [(7 * bucket) % 4 for bucket in range(40)]  # 0, 3, 2, 1, ...
    lanes = Lanes(dist.group.WORLD, rounds=max(rounds))
    chance = random.Random(rank)
    futures = []
    for bucket, count in enumerate(rounds):
        time.sleep(chance.random() * 2e-3)
        tensor = torch.tensor([float(rank + bucket)])
        futures.append(lanes.run(_task(_average(tensor, count), bucket, world_size, 3)))
    expected = [bucket + (1.0 if count else rank) for bucket, count in enumerate(rounds)]
    assert [float(future.wait()) for future in futures] == pytest.approx(expected)
    lanes.close()


def _one_row():
    yield ReduceScatter(torch.ones(1))  # one row per rank is needed


@on_ranks(2)
def test_an_exchange_that_the_caller_waits_for_runs_between_others(rank, world_size):
    lanes = Lanes(dist.group.WORLD, rounds=2)
    before = lanes.run(_task(_average(torch.tensor([float(rank)]), 2), 0, world_size, 2))
    rows = []
    task = _task(_average(torch.tensor([4.0 * rank]), 2), 1, world_size, 2)
    task.record = rows.append
    here = lanes.run_here(task)
    assert here.done()
    with pytest.raises(RuntimeError, match="reduce_scatter failed in step 0, bucket 2, round 0"):
        lanes.run_here(_task(_one_row(), 2, world_size, 1)).wait()
    after = lanes.run(_task(_average(torch.tensor([float(rank)]), 2), 3, world_size, 2))
    assert [float(future.wait()) for future in (before, here, after)] == [0.5, 2.0, 0.5]
    lanes.close()
    assert len(rows) == 2
    for row in rows:
        assert row.resumed <= row.yielded <= row.issued <= row.done <= row.finished


@on_ranks(3)
def test_closing_ends_what_is_under_way_for_the_other_ranks_wait_for_it(rank, world_size):
    lanes = Lanes(dist.group.WORLD, rounds=2)
    for bucket in range(20):
        future = lanes.run(_task(_average(torch.ones(1), 2), bucket, world_size, 2))
    time.sleep(0.2 * rank)  # its first collective completes for the others only now
    lanes.close()
    assert future.done()
    assert future.value().item() == 1.0


@on_ranks(2, pg_timeout=17)
def test_every_lane_has_the_timeout_of_the_callers_group():
    lanes = Lanes(dist.group.WORLD, rounds=3)
    assert [group_timeout(lane.group) for lane in lanes._lanes] == [timedelta(seconds=17)] * 3
    lanes.close()


# ---- errors


def _one_backward(model, rank, step):
    model.zero_grad()
    model(batch(step, rank, 4, 8)).square().sum().backward()


def _fails(rank, scheme):
    """The error of the first two steps, where there is one."""
    model = ddp(_layers(4), TINY)
    hook = commhooks.register(model, scheme)
    errors = [outcome(_one_backward, model, rank, step) for step in range(2)]
    begin = time.monotonic()
    hook.close()
    hook.close()
    assert time.monotonic() - begin < 2
    assert "commhooks-lanes" not in [thread.name for thread in threading.enumerate()]
    return errors


@on_ranks(2)
def test_more_rounds_than_declared_is_an_error_on_every_rank(rank):
    _, text = _fails(rank, TwoRounds(extra_round=True))[0]
    assert "RoundsError" in text
    assert "declares rounds=2" in text


@on_ranks(2, timeout=40)
def test_an_exception_in_round_two_names_step_bucket_and_round_and_lanes_close(rank):
    coalesced = commhooks.make(TwoRounds(raise_in_bucket=0), coalesce=True)
    # Buckets come in reverse order of the layers; of a coalesced step all fail.
    for scheme, bucket in (
        (TwoRounds(raise_in_bucket=0), 0),
        (TwoRounds(raise_in_bucket=2), 1),
        (coalesced, 0),
    ):
        first, second = _fails(rank, scheme)
        assert first is None
        assert "ValueError" in second[1]
        assert "this scheme cannot go on" in second[1]
        assert f"step 1, bucket {bucket}, round 1" in second[1]
    model = ddp(_layers(4), TINY)  # another one trains all the same
    hook = commhooks.register(model, "powersgd")
    _one_backward(model, rank, 2)
    hook.close()
    assert equal_on_all_ranks(gradients(model))


# ---- teardown


def _pool():
    pool = _pools.get(dist.group.WORLD)
    return (0, 0) if pool is None else (len(pool.all), len(pool.free))


@pytest.mark.parametrize("close", [True, False])
@on_ranks(2)
def test_a_hook_leaves_no_thread_and_its_group_to_the_next(rank, close):
    def count():
        dist.barrier()
        threads = [t for t in threading.enumerate() if t.name == "commhooks-lanes"]
        return len(threads), *_pool()

    def hooked():
        model = ddp(mlp())
        hook = commhooks.register(model, "powersgd")
        model(batch(0, rank, 4, 16)).sum().backward()
        return model, hook

    assert count() == (0, 0, 0)
    for _ in range(2):
        model, hook = hooked()
        assert count() == (1, 1, 0)
        if close:
            hook.close()
            hook.close()
        del model, hook
        gc.collect()
        assert count() == (0, 1, 1)


@on_ranks(2)
def test_a_group_may_end_right_after_its_last_collective(rank, world_size):
    """A group that is released by one of its own threads aborts the process."""
    for number in range(15):
        group = dist.new_group(list(range(world_size)))
        model = ddp(mlp(), process_group=group)
        hook = commhooks.register(model, "none")
        for step in range(2):
            model(batch(step, rank, 4, 16)).sum().backward()
        if number % 2:
            hook.close()
        del model, hook
        dist.destroy_process_group(group)
        del group


@on_ranks(4)
def test_lanes_may_close_right_after_they_opened():
    # Without a barrier one time in a few hundred fails: a rank closes while another connects.
    for _ in range(40):
        commhooks.register(ddp(mlp()), "powersgd").close()


@on_ranks(2)
def test_a_step_after_close_is_a_clear_error(rank):
    model = ddp(mlp())
    commhooks.register(model, "powersgd").close()
    error = outcome(lambda: model(batch(0, rank, 4, 16)).sum().backward())
    assert "the hook was closed" in error[1]


EXIT_PATHS = {
    "end of the script": "",
    "destroy, no close": "dist.destroy_process_group()",
    "close after destroy": "dist.destroy_process_group(); hook.close()",
    "hook in a cycle": "hook.me = hook; model.me = model; del hook, model",
    "exception in backward": "fail_in_backward(model)",
    "uncaught exception": "raise SystemExit(3)",
}
# Forks twice per way to end, after the slow imports; unlike multiprocessing's processes these end
# as a script does: exit functions run, modules are torn down.
_EXIT_SCRIPT = """
import gc, os, sys, torch, torch._dynamo
import torch.distributed as dist
import commhooks
from tests.hook.test_lanes import EXIT_PATHS
from tests.tools.training import ddp, mlp, outcome, train

def fail_in_backward(model):
    def fail(grad):
        raise ValueError("in backward")
    next(model.parameters()).register_hook(fail)
    assert outcome(lambda: model(torch.ones(1, 16)).sum().backward())

gc.collect(), gc.freeze()  # as in preloaded.py: an end costs seconds else
pids = {}
for number, path in enumerate(EXIT_PATHS):
    for rank in range(2):
        pids[number, rank] = pid = os.fork()
        if pid == 0:
            break
    else:
        for rank in range(2):
            status = os.waitpid(pids[number, rank], 0)[1]
            print(number, rank, os.waitstatus_to_exitcode(status), flush=True)
        continue
    break
if pid == 0:
    log = os.open(f"{sys.argv[1]}/{number}-{rank}", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 1), os.dup2(log, 2)
    torch.set_num_threads(1)
    store = dist.FileStore(f"{sys.argv[1]}/store{number}", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    model = ddp(mlp())
    hook = commhooks.register(model, "powersgd")
    train(model, rank, range(3))
    dist.barrier()
    exec(EXIT_PATHS[path])
"""


def _ends(directory):
    """Exit code and output of two ranks for each way to end."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", _EXIT_SCRIPT, str(directory)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    ends = {}
    for line in done.stdout.splitlines():
        number, rank, code = map(int, line.split())
        text = Path(directory, f"{number}-{rank}").read_text()
        ends.setdefault(list(EXIT_PATHS)[number], []).append((code, text))
    return ends


@pytest.mark.slow
def test_a_process_ends_cleanly_whatever_it_leaves_open(tmp_path):
    ends = _ends(tmp_path)
    assert list(ends) == list(EXIT_PATHS)
    for path, ranks in ends.items():
        for code, text in ranks:
            assert code == (3 if path == "uncaught exception" else 0), (path, text)
            assert not any(word in text.lower() for word in ("traceback", "abort", "terminate"))
