"""The process that holds the store falls silent: nobody waits beyond the group's timeout."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import commhooks
import ddp_core
from commhooks.errors import SilentStoreError
from experiments.tools import namespaces
from tests.faults import silent_stores
from tests.tools.harness import on_ranks, store_process
from tests.tools.training import batch, mlp

CLASSES = {
    "torch": torch.nn.parallel.DistributedDataParallel,
    "core": ddp_core.DistributedDataParallel,
}
TIMEOUT = 3.0
MORE = silent_stores.MORE


@contextmanager
def _silent() -> Iterator[None]:
    """The store's host is stopped inside, for all ranks."""
    dist.barrier()
    os.kill(store_process(), signal.SIGSTOP)
    time.sleep(0.1)
    yield
    dist.barrier()
    os.kill(store_process(), signal.SIGCONT)


def _ends_in_time(call: Callable[[], Any]) -> str:
    """Returns the error's type and text."""
    begin = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        call()
    seconds = time.monotonic() - begin
    assert seconds < TIMEOUT + MORE, (seconds, caught.value)
    return f"{type(caught.value).__name__}: {caught.value}"


def _step(model: Any, rank: int) -> None:
    model.zero_grad()
    model(batch(0, rank, 4, 16)).square().sum().backward()


@pytest.mark.slow
@on_ranks(2, pg_timeout=TIMEOUT)
def test_a_call_that_waits_for_the_store_ends_at_the_timeout(rank: int) -> None:
    model, errors = CLASSES["core"](mlp()), {}
    with _silent():
        errors["register"] = _ends_in_time(lambda: commhooks.register(model, "powersgd", rank=1))
    hook = commhooks.register(model, "powersgd", rank=1)
    other = dist.new_group(timeout=timedelta(seconds=TIMEOUT))
    _step(model, rank)
    with _silent():
        _step(model, rank)  # which needs no store
        errors["switch"] = _ends_in_time(lambda: hook.switch("int8"))
        errors["state_dict"] = _ends_in_time(lambda: hook.state_dict(gather=True))
        errors["change_group"] = _ends_in_time(lambda: hook.change_group(other))
    hook.switch("int8")  # all may call again
    _step(model, rank)
    for call, text in errors.items():
        assert text.startswith(SilentStoreError.__name__), (call, text)
        assert "has not answered for 3 s" in text, (call, text)


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        *(("process", "torch"), ("process", "core"), ("rank 0", "core")),
        pytest.param("cable", "core", marks=pytest.mark.netns),
    ],
)
def test_a_step_ends_in_time_whoever_holds_the_store(fault: str, kind: str) -> None:
    if fault == "cable" and namespaces.access().kind != "root":
        pytest.skip("needs root, and network namespaces")
    begin = "CollectiveError: the exchange failed in step 3"
    text = "in step 3, bucket 0" if fault == "process" else begin
    for wait in silent_stores.run(silent_stores.Case(fault, kind, "step"), TIMEOUT):
        assert TIMEOUT - 1 < wait.seconds < TIMEOUT + MORE, wait
        assert text in wait.text, wait


@pytest.mark.slow
@pytest.mark.parametrize("moment", silent_stores.MOMENTS)
@pytest.mark.parametrize(("fault", "kind"), [("process", "torch"), ("rank 0", "core")])
def test_no_wait_is_longer_than_the_timeout(fault: str, kind: str, moment: str) -> None:
    for wait in silent_stores.run(silent_stores.Case(fault, kind, moment), TIMEOUT):
        assert wait.seconds < TIMEOUT + MORE, wait
