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

import commhooks
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
from tests.tools.harness import run_ranks
from tests.tools.training import batch, ddp, equal_bits, mlp, outcome, parameters

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


def _train_with_delays(rank, world_size, steps):
    model = ddp(_layers(), TINY)
    _pauses(model, rank)
    scheme = Jitter(commhooks.make("powersgd", rank=1), share=0.02)
    hook = commhooks.register(model, scheme)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(steps):
        optimizer.zero_grad()
        model(batch(step, rank, 4, 8)).square().sum().backward()
        optimizer.step()
    rounds = {(row.bucket, row.round) for row in hook.ledger._rows if row.step == steps - 1}
    hook.close()
    return parameters(model), len(rounds)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "steps"),
    [
        (2, 40),
        (4, 20),
        pytest.param(2, 500, marks=[pytest.mark.slow, pytest.mark.timeout(300)]),
        pytest.param(4, 500, marks=[pytest.mark.slow, pytest.mark.timeout(300)]),
    ],
)
def test_36_buckets_of_two_rounds_with_random_delays_finish_with_equal_bits(world_size, steps):
    results = run_ranks(_train_with_delays, world_size, steps, timeout=280)
    assert [rounds for _, rounds in results] == [2 * BUCKETS] * world_size
    assert equal_bits([weights for weights, _ in results])
    assert results[0][0].isfinite().all()


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


def _works_meanwhile(rank, world_size, driver):
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

    return float(_run_by(driver, _task(exchange(), 0, world_size, 2))), order


DRIVERS = pytest.mark.parametrize("driver", ["lanes", "here", "streams"])


@DRIVERS
def test_work_is_done_while_the_collective_is_under_way(driver):
    order = ["work 0", "result 0", "work 1", "result 1"]
    assert run_ranks(_works_meanwhile, 2, driver) == [(0.5, order)] * 2


def _collective_ends_first(rank, world_size, driver):
    tensor, resumed = torch.ones(1), threading.Event()
    found = []

    def work():
        deadline = time.monotonic() + 20
        while float(tensor) == 1.0 and time.monotonic() < deadline:
            time.sleep(1e-3)
        found.append(resumed.wait(0.2))

    def exchange():
        sum_ = yield from overlapped(AllReduce(tensor, "sum"), work)
        resumed.set()
        return sum_

    return float(_run_by(driver, _task(exchange(), 0, world_size, 1))), found


@DRIVERS
def test_an_exchange_goes_on_when_its_work_is_done_too(driver):
    assert run_ranks(_collective_ends_first, 2, driver) == [(2.0, [False])] * 2


def _work_fails(rank, world_size, driver):
    def work():
        raise ValueError("no room")

    def exchange():
        return (yield from overlapped(AllReduce(torch.ones(1)), work))

    with pytest.raises(RuntimeError) as caught:
        _run_by(driver, _task(exchange(), 3, world_size, 1))
    return str(caught.value)


@DRIVERS
def test_work_that_fails_is_a_failure_of_the_scheme(driver):
    for message in run_ranks(_work_fails, 2, driver):
        assert "the scheme failed in step 0, bucket 3, round 0: ValueError: no room" in message


def _mixed_rounds(rank, world_size, rounds):
    lanes = Lanes(dist.group.WORLD, rounds=max(rounds))
    chance = random.Random(rank)
    futures = []
    for bucket, count in enumerate(rounds):
        time.sleep(chance.random() * 2e-3)
        tensor = torch.tensor([float(rank + bucket)])
        futures.append(lanes.run(_task(_average(tensor, count), bucket, world_size, 3)))
    values = [float(future.wait()) for future in futures]
    lanes.close()
    return values


@pytest.mark.parametrize("world_size", [2, 3])
def test_buckets_with_fewer_rounds_pass_their_turn(world_size):
    rounds = [(7 * bucket) % 4 for bucket in range(40)]  # 0, 3, 2, 1, ...
    for rank, values in enumerate(run_ranks(_mixed_rounds, world_size, rounds)):
        mean = (world_size - 1) / 2
        want = [bucket + (mean if count else rank) for bucket, count in enumerate(rounds)]
        assert values == pytest.approx(want)


def _one_row():
    yield ReduceScatter(torch.ones(1))  # one row per rank is needed


def _run_here(rank, world_size):
    lanes = Lanes(dist.group.WORLD, rounds=2)
    before = lanes.run(_task(_average(torch.tensor([float(rank)]), 2), 0, world_size, 2))
    rows = []
    task = _task(_average(torch.tensor([4.0 * rank]), 2), 1, world_size, 2)
    task.record = rows.append
    here = lanes.run_here(task)
    done_at_once = here.done()
    with pytest.raises(RuntimeError, match="reduce_scatter failed in step 0, bucket 2, round 0"):
        lanes.run_here(_task(_one_row(), 2, world_size, 1)).wait()
    after = lanes.run(_task(_average(torch.tensor([float(rank)]), 2), 3, world_size, 2))
    values = [float(future.wait()) for future in (before, here, after)]
    ordered = all(
        row.resumed <= row.yielded <= row.issued <= row.done <= row.finished for row in rows
    )
    lanes.close()
    return done_at_once, values, len(rows), ordered


def test_an_exchange_that_the_caller_waits_for_runs_between_others():
    assert run_ranks(_run_here, 2) == [(True, [0.5, 2.0, 0.5], 2, True)] * 2


def _closed_in_flight(rank, world_size):
    lanes = Lanes(dist.group.WORLD, rounds=2)
    for bucket in range(20):
        future = lanes.run(_task(_average(torch.ones(1), 2), bucket, world_size, 2))
    time.sleep(0.2 * rank)  # its first collective completes for the others only now
    lanes.close()
    return future.done() and future.value().item()


def test_closing_ends_what_is_under_way_for_the_other_ranks_wait_for_it():
    assert run_ranks(_closed_in_flight, 3) == [1.0] * 3


def _lane_timeouts(rank, world_size):
    lanes = Lanes(dist.group.WORLD, rounds=3)
    timeouts = [group_timeout(lane.group) for lane in lanes._lanes]
    lanes.close()
    return timeouts


def test_every_lane_has_the_timeout_of_the_callers_group():
    timeouts = run_ranks(_lane_timeouts, 2, pg_timeout=17)
    assert timeouts == [[timedelta(seconds=17)] * 3] * 2


# ---- errors


def _one_backward(model, rank, step):
    model.zero_grad()
    model(batch(step, rank, 4, 8)).square().sum().backward()


def _train_into_error(rank, world_size, scheme):
    model = ddp(_layers(4), TINY)
    hook = commhooks.register(model, scheme)
    errors = [outcome(_one_backward, model, rank, step) for step in range(2)]
    begin = time.monotonic()
    hook.close()
    hook.close()
    names = [thread.name for thread in threading.enumerate()]
    return errors, time.monotonic() - begin, names


def test_more_rounds_than_declared_is_an_error_on_every_rank():
    for errors, _, _ in run_ranks(_train_into_error, 2, TwoRounds(extra_round=True)):
        assert "RoundsError" in errors[0][1]
        assert "declares rounds=2" in errors[0][1]


@pytest.mark.parametrize("bucket", [0, 2])
def test_an_exception_in_round_two_names_step_bucket_and_round(bucket):
    for errors, _, _ in run_ranks(_train_into_error, 2, TwoRounds(raise_in_bucket=bucket)):
        assert errors[0] is None
        assert "this scheme cannot go on" in errors[1][1]
        assert "ValueError" in errors[1][1]
        where = 0 if bucket == 0 else 3 - bucket  # buckets come in reverse order of the layers
        assert f"step 1, bucket {where}, round 1" in errors[1][1]


def test_an_exception_reaches_every_bucket_of_a_coalesced_step():
    scheme = commhooks.make(TwoRounds(raise_in_bucket=0), coalesce=True)
    for errors, _, _ in run_ranks(_train_into_error, 2, scheme, timeout=20):
        assert errors[0] is None
        assert "step 1, bucket 0, round 1" in errors[1][1]


def test_lanes_close_quickly_and_twice_after_an_exception():
    for _, seconds, names in run_ranks(_train_into_error, 2, TwoRounds(raise_in_bucket=0)):
        assert seconds < 2
        assert "commhooks-lanes" not in names


def _train_on_after_error(rank, world_size):
    model = ddp(_layers(4), TINY)
    hook = commhooks.register(model, TwoRounds(raise_in_bucket=0))
    errors = [outcome(_one_backward, model, rank, step) for step in range(2)]
    new = ddp(_layers(4), TINY)
    again = commhooks.register(new, "powersgd")
    _one_backward(new, rank, 2)
    hook.close()
    again.close()
    return errors[1] is not None, parameters(new)


def test_another_model_trains_after_an_exception_in_one():
    results = run_ranks(_train_on_after_error, 2)
    assert [failed for failed, _ in results] == [True, True]
    assert equal_bits([weights for _, weights in results])


# ---- teardown


def _pool():
    pool = _pools.get(dist.group.WORLD)
    return (0, 0) if pool is None else (len(pool.all), len(pool.free))


def _what_is_left(rank, world_size, close):
    def count():
        dist.barrier()
        threads = [t for t in threading.enumerate() if t.name == "commhooks-lanes"]
        return len(threads), *_pool()

    def train():
        model = ddp(mlp())
        hook = commhooks.register(model, "powersgd")
        model(batch(0, rank, 4, 16)).sum().backward()
        return model, hook

    counts = [count()]
    for _ in range(2):
        model, hook = train()
        counts.append(count())
        if close:
            hook.close()
            hook.close()
        del model, hook
        gc.collect()
        counts.append(count())
    return counts


@pytest.mark.parametrize("close", [True, False])
def test_a_hook_leaves_no_thread_and_its_group_to_the_next(close):
    unused, in_use, left = (0, 0, 0), (1, 1, 0), (0, 1, 1)
    for counts in run_ranks(_what_is_left, 2, close):
        assert counts == [unused, in_use, left, in_use, left]


def _many_groups(rank, world_size, times):
    """Each time: a group, two steps, and everything dropped at once."""
    for number in range(times):
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
    return times


def test_a_group_may_end_right_after_its_last_collective():
    # A group that is released by one of its own threads aborts the process.
    assert run_ranks(_many_groups, 2, 15) == [15, 15]


def _open_and_close(rank, world_size, times):
    for _ in range(times):
        commhooks.register(ddp(mlp()), "powersgd").close()
    return times


def test_lanes_may_close_right_after_they_opened():
    # Without a barrier one time in a few hundred fails: a rank closes while another connects.
    assert run_ranks(_open_and_close, 4, 40) == [40] * 4


def _step_after_close(rank, world_size):
    model = ddp(mlp())
    hook = commhooks.register(model, "powersgd")
    hook.close()
    return outcome(lambda: model(batch(0, rank, 4, 16)).sum().backward())


def test_a_step_after_close_is_a_clear_error():
    for error in run_ranks(_step_after_close, 2):
        assert error is not None
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
from tests.tools.training import batch, ddp, mlp, outcome

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
    for step in range(3):
        model(batch(step, rank, 4, 16)).square().sum().backward()
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
    found = {}
    for line in done.stdout.splitlines():
        number, rank, code = map(int, line.split())
        text = Path(directory, f"{number}-{rank}").read_text()
        found.setdefault(list(EXIT_PATHS)[number], []).append((code, text))
    return found


@pytest.mark.slow
def test_a_process_ends_cleanly_whatever_it_leaves_open(tmp_path):
    found = _ends(tmp_path)
    assert list(found) == list(EXIT_PATHS)
    for path, ranks in found.items():
        for got, text in ranks:
            assert got == (3 if path == "uncaught exception" else 0), (path, text)
            assert not any(word in text.lower() for word in ("traceback", "abort", "terminate"))
