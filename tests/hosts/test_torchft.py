"""A hook follows torchft's quorum: by the signature that torchft publishes, and in torchft."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import sys
import warnings
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from commhooks.errors import RegistrationError
from commhooks.hosts import torchft as host
from tests.tools.harness import on_ranks, run_ranks
from tests.tools.training import batch, equal_bits, everyone, flat, gradients, mlp, residuals

SCHEMES = {"int8": {}, "topk": {"ratio": 0.2}, "powersgd": {"rank": 1}}


class Wrapper:
    """A reconfigurable group, as torchft's are: what it has inside changes."""

    def __init__(self) -> None:
        self._pg: Any = None


class Manager:
    """Answers the adapter as ``torchft.Manager`` does, for quorums that a test decides."""

    def __init__(self, rank: int) -> None:
        self._rank, self._pg = rank, Wrapper()
        self._error: Exception | None = None
        self.errors: list[str] = []
        self._ranks: list[int] = []
        self._healing = False

    def start_quorum(self, number: int, ranks: list[int], healing: tuple[int, ...] = ()) -> None:
        self._error, self._healing = None, self._rank in healing
        self._participants = len(ranks) - len(healing)
        if ranks != self._ranks:
            place, size = ranks.index(self._rank), len(ranks)
            store = dist.PrefixStore(f"quorum/{number}", dist.distributed_c10d._get_default_store())
            gloo = dist.ProcessGroupGloo(store, place, size, timedelta(seconds=3))
            group: Any = dist.ProcessGroup(store, place, size)
            group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
            kind = dist.ProcessGroup.BackendType.GLOO
            group._register_backend(torch.device("cpu"), kind, gloo)
            self._pg._pg, self._ranks = group, ranks

    def wait_quorum(self) -> None:
        pass

    def errored(self) -> Exception | None:
        return self._error

    def report_error(self, error: Exception) -> None:
        self._error = error
        self.errors.append(str(error))

    def is_participating(self) -> bool:
        return not self._healing

    def num_participants(self) -> int:
        return self._participants


def _model(rank: int) -> DistributedDataParallel:
    alone = dist.new_group([rank], use_local_synchronization=True)
    return DistributedDataParallel(
        mlp(), process_group=alone, find_unused_parameters=True, bucket_cap_mb=1.5 / 1024
    )


def _step(model: Any, number: int, rank: int) -> torch.Tensor:
    model.zero_grad()
    model(batch(number, rank, 4, 16)).square().sum().backward()
    return gradients(model)


def _mean(manager: Manager, value: torch.Tensor) -> torch.Tensor:
    total = value.clone()
    manager._pg._pg.allreduce([total]).wait()
    return total / manager._pg._pg.size()


@pytest.mark.parametrize("scheme", SCHEMES)
@on_ranks(3, timeout=90, pg_timeout=20)
def test_a_hook_follows_the_quorum(rank: int, scheme: str) -> None:
    manager, model = Manager(rank), _model(rank)
    hook = host.register(model, manager, scheme, **SCHEMES[scheme])
    results = []
    for number in range(3):
        manager.start_quorum(1, [0, 1, 2])
        results.append(_step(model, number, rank))
    assert not manager.errors
    assert hook.step == 3
    held = residuals(hook, model)
    # An error of somebody else's, after some buckets: the manager does not commit this step.
    error = ValueError("on purpose")
    handle = next(model.parameters()).register_hook(lambda _: manager.report_error(error))
    manager.start_quorum(1, [0, 1, 2])
    _step(model, 3, rank)
    handle.remove()
    assert torch.equal(residuals(hook, model), held)
    assert hook.step == 3
    both = dist.new_group([0, 1])
    if rank == 2:  # it dies, and comes back as another replica
        results += [torch.zeros(())] * 2
        model, manager = _model(rank), Manager(rank)
        hook = host.register(model, manager, scheme, **SCHEMES[scheme])
    else:
        manager.start_quorum(1, [0, 1, 2])
        _step(model, 3, rank)
        assert manager.errored() is not None  # and backward has not raised
        assert torch.equal(residuals(hook, model), held)
        dist.barrier(both)
        for number in range(4, 6):
            manager.start_quorum(2, [0, 1])
            results.append(_step(model, number, rank))
            assert manager.errored() is None
        assert hook.group_changes[-1].lost == 1
        assert hook.world_size == 2
        assert hook.step in (5, 6)  # the step that failed may have ended, and kept nothing
    dist.barrier()
    # The replica that recovers sends zeros, and does not count.
    manager.start_quorum(3, [0, 1, 2], (2,))
    held = _mean(manager, residuals(hook, model))
    if rank == 2:
        assert not held.numel() or hook.step == 0
    results.append(_step(model, 6, rank))
    assert manager.errored() is None, manager.errors
    assert hook.group_changes[-1].joined == (2,)
    if scheme == "int8":
        alone = mlp()
        local = []
        for value in (0, 1):
            alone.zero_grad()
            alone(batch(6, value, 4, 16)).square().sum().backward()
            local.append(gradients(alone))
        torch.testing.assert_close(results[-1], (local[0] + local[1]) / 2, rtol=0.05, atol=0.05)
    manager.start_quorum(3, [0, 1, 2])
    results.append(_step(model, 7, rank))
    hook.close()
    for number, grads in enumerate(zip(*everyone(results), strict=True)):
        assert equal_bits([grad for grad in grads if grad.dim()]), number


@on_ranks(2)
def test_a_model_that_averages_itself_is_refused(rank: int) -> None:
    over_all = DistributedDataParallel(mlp())
    with pytest.raises(RegistrationError, match=r"ProcessGroupDummy\(0, 1\)"):
        host.register(over_all, Manager(rank), "int8")


def test_what_a_gpu_does_not_end_in_time_gives_the_group_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits: list[Any] = []
    published = SimpleNamespace(stream_timeout=lambda *limit: limits.append(limit))
    monkeypatch.setitem(sys.modules, "torchft", SimpleNamespace(futures=published))
    monkeypatch.setitem(sys.modules, "torchft.futures", published)
    manager: Any = SimpleNamespace(_pg=SimpleNamespace(abort=print), _timeout=timedelta(seconds=7))
    follower = host._QuorumHook(manager, None)  # type: ignore[arg-type]
    mean: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    mean.set_result(torch.ones(3))
    for device in ("cpu", "cuda"):
        buffer: Any = SimpleNamespace(device=torch.device(device))
        assert follower._outcome(mean, buffer, 2.0).tolist() == [2.0] * 3
    assert limits == [(print, timedelta(seconds=7))]


@pytest.mark.parametrize("how", ["beside", "through"])
@on_ranks(2)
def test_a_loss_computed_beside_the_wrapper_warns_at_the_end(
    rank: int, world_size: int, how: str
) -> None:
    manager, model = Manager(rank), _model(rank)
    manager.start_quorum(len(how), list(range(world_size)))
    hook = host.register(model, manager, "int8")
    for number in range(3):
        module = model.module if how == "beside" else model
        module(batch(number, rank, 4, 16)).square().sum().backward()
    held = {"hook": hook, "model": model}
    del hook, model, module
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        held.clear()
        gc.collect()
    messages = [
        str(warning.message) for warning in caught if "never called" in str(warning.message)
    ]
    assert len(messages) == (how == "beside")


# ---- torchft itself


def _manager(rank: int, address: str, module: Any) -> Any:
    from torchft import Manager, ProcessGroupGloo

    os.environ["REPLICA_GROUP_ID"] = str(rank)
    # A replica of torchft's has no group of torch.distributed's in common with the others.
    dist.destroy_process_group()
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager: Any = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        min_replica_size=1,
        load_state_dict=lambda state: module.load_state_dict(state),
        state_dict=module.state_dict,
        replica_id=f"replica{rank}",
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=address,
        use_async_quorum=False,
        timeout=timedelta(seconds=20),
    )
    manager.kept = store
    return manager


def _replica(rank: int, world_size: int, address: str, scheme: str) -> Any:
    from torchft import Optimizer
    from torchft.process_group import ProcessGroupDummy

    module = mlp(seed=rank)
    manager = _manager(rank, address, module)
    try:
        model = DistributedDataParallel(
            module,
            process_group=ProcessGroupDummy(0, 1),
            find_unused_parameters=True,
            bucket_cap_mb=1.5 / 1024,
        )
        hook = host.register(model, manager, scheme, **SCHEMES[scheme])
        optimizer = Optimizer(manager, torch.optim.SGD(module.parameters(), 0.01))
        for number in range(40):
            optimizer.zero_grad()
            model(batch(number, rank, 4, 16)).square().sum().backward()
            optimizer.step()
            if rank == 2 and manager.current_step() == 4:
                return None  # it leaves without a word
            if manager.current_step() >= 12:
                break
        changes = [(value.before, value.world_size, value.lost) for value in hook.group_changes]
        return manager.current_step(), hook.step, changes, flat(module.parameters())
    finally:
        with contextlib.suppress(Exception):
            manager.shutdown(wait=False)


@pytest.mark.skipif(importlib.util.find_spec("torchft") is None, reason="torchft is not installed")
@pytest.mark.parametrize("scheme", ["topk", "powersgd"])
def test_torchft_loses_a_replica_and_goes_on(scheme: str) -> None:
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=2, join_timeout_ms=3000)
    options: Any = {"timeout": 120, "may_die": (2,), "ignore_warnings": (".*",)}
    try:
        results = run_ranks(_replica, 3, lighthouse.address(), scheme, **options)
    finally:
        lighthouse.shutdown()
    for steps, hook_steps, changes, _ in results[:2]:
        assert steps >= 12
        assert hook_steps >= 12
        assert changes[-1][1] == 2
        assert any(lost for _, _, lost in changes)
    assert equal_bits([value[3] for value in results[:2]])
