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

from commhooks.errors import MismatchError, RegistrationError
from commhooks.hosts import torchft as host
from commhooks.hosts.torchft_collectives import allreduce_quantized, reduce_scatter_quantized
from tests.distributed.harness import run_ranks
from tests.distributed.training import batch, equal_bits, flat, gradients, mlp, residuals

SCHEMES = {"int8": {}, "topk": {"ratio": 0.2}, "powersgd": {"rank": 1}}


class Wrapper:
    """A reconfigurable group, as torchft's are: what it has inside changes."""

    def __init__(self) -> None:
        self._pg: Any = None


class Manager:
    """What the adapter asks of ``torchft.Manager``, for quorums that a test decides."""

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


def _quorums(rank: int, world_size: int, scheme: str) -> Any:
    manager, model = Manager(rank), _model(rank)
    hook = host.register(model, manager, scheme, **SCHEMES[scheme])
    found = []
    for number in range(3):
        manager.start_quorum(1, [0, 1, 2])
        found.append(_step(model, number, rank))
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
        found += [torch.zeros(())] * 2
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
            found.append(_step(model, number, rank))
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
    found.append(_step(model, 6, rank))
    assert manager.errored() is None, manager.errors
    assert hook.group_changes[-1].joined == (2,)
    if scheme == "int8":
        alone = mlp()
        own = []
        for one in (0, 1):
            alone.zero_grad()
            alone(batch(6, one, 4, 16)).square().sum().backward()
            own.append(gradients(alone))
        torch.testing.assert_close(found[-1], (own[0] + own[1]) / 2, rtol=0.05, atol=0.05)
    manager.start_quorum(3, [0, 1, 2])
    found.append(_step(model, 7, rank))
    hook.close()
    dist.barrier()
    return found


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_hook_follows_the_quorum(scheme: str) -> None:
    found = run_ranks(_quorums, 3, scheme, timeout=90, pg_timeout=20)
    for number, grads in enumerate(zip(*found, strict=True)):
        assert equal_bits([one for one in grads if one.dim()]), number


def _refused(rank: int, world_size: int) -> None:
    over_all = DistributedDataParallel(mlp())
    with pytest.raises(RegistrationError, match=r"ProcessGroupDummy\(0, 1\)"):
        host.register(over_all, Manager(rank), "int8")


def test_a_model_that_averages_itself_is_refused() -> None:
    run_ranks(_refused, 2)


def test_what_a_gpu_does_not_end_in_time_gives_the_group_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits: list[Any] = []
    published = SimpleNamespace(stream_timeout=lambda *what: limits.append(what))
    monkeypatch.setitem(sys.modules, "torchft", SimpleNamespace(futures=published))
    monkeypatch.setitem(sys.modules, "torchft.futures", published)
    manager: Any = SimpleNamespace(_pg=SimpleNamespace(abort=print), _timeout=timedelta(seconds=7))
    follower = host._Follower(manager, None)  # type: ignore[arg-type]
    mean: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    mean.set_result(torch.ones(3))
    for device in ("cpu", "cuda"):
        buffer: Any = SimpleNamespace(device=torch.device(device))
        assert follower._outcome(mean, buffer, 2.0).tolist() == [2.0] * 3
    assert limits == [(print, timedelta(seconds=7))]


def _never_called(rank: int, world_size: int, how: str) -> None:
    manager, model = Manager(rank), _model(rank)
    manager.start_quorum(1, list(range(world_size)))
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
    told = [str(one.message) for one in caught if "never called" in str(one.message)]
    assert len(told) == (how == "beside")


@pytest.mark.parametrize("how", ["beside", "called"])
def test_a_loss_computed_beside_the_wrapper_warns_at_the_end(how: str) -> None:
    run_ranks(_never_called, 2, how)


# ---- torchft's quantized collectives, by the signature that it publishes


def _tensors(rank: int, number: int) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(10 * number + rank)
    return [torch.randn(*shape, generator=random) for shape in ((40, 50), (1700,), (5, 30, 20))]


def _quantized(rank: int, world_size: int) -> list[list[torch.Tensor]]:
    wrapper, manager = Wrapper(), Manager(rank)
    manager._pg = wrapper
    options, found = dist.AllreduceOptions(), []
    options.reduceOp = dist.ReduceOp.AVG
    for number, ranks in enumerate([[0, 1, 2], [0, 1, 2], [0, 1], [0, 1, 2]]):
        if rank not in ranks:  # it comes back with the next quorum
            manager._ranks = []
            dist.barrier()
            continue
        manager.start_quorum(number, ranks)
        for opts, share in ((options, len(ranks)), (dist.ReduceOp.SUM, 1)):
            ours = _tensors(rank, number)
            work = allreduce_quantized(ours, opts, wrapper, None, scheme="int8")
            assert isinstance(work, dist.Work)
            work.wait()
            assert work.get_future().value() == ours
            for place, one in enumerate(ours):
                exact = sum(_tensors(other, number)[place] for other in ranks) / share
                assert 0 < float((one - exact).norm() / exact.norm()) < 0.02
            found.append(ours)
        if len(ranks) == 2:
            dist.barrier()
    return found


def test_tensors_are_reduced_by_a_scheme_in_each_quorum() -> None:
    found = run_ranks(_quantized, 3, timeout=90)
    assert [len(one) for one in found] == [8, 8, 6]
    for number, lists in enumerate(zip(found[0], found[1], strict=True)):
        assert equal_bits([torch.cat([one.view(-1) for one in ours]) for ours in lists]), number
    assert equal_bits([torch.cat([one.view(-1) for one in ours[-1]]) for ours in found])


def _draws(rank: int, world_size: int) -> list[torch.Tensor]:
    """Rounds equal values in three quorums; one rank is away in the second."""
    wrapper, manager = Wrapper(), Manager(rank)
    manager._pg, found = wrapper, []
    for number, ranks in enumerate([[0, 1, 2], [0, 1], [0, 1, 2]]):
        if rank in ranks:
            manager.start_quorum(number, ranks)
            one = _tensors(rank, 0)[0]
            allreduce_quantized([one], dist.ReduceOp.AVG, wrapper, scheme="int8").wait()
            found.append(one)
        else:
            manager._ranks = []
        dist.barrier()
    return found


def test_random_draws_go_on_with_the_next_quorum() -> None:
    found = run_ranks(_draws, 3)
    assert equal_bits([one[-1] for one in found])
    assert not torch.equal(found[0][0], found[0][-1])


def _scattered(rank: int, world_size: int, scheme: str, allowed: float) -> None:
    inputs = _tensors(rank, 0)
    sizes = [(-(-len(one) // world_size), *one.shape[1:]) for one in inputs]
    numels = [torch.Size(one).numel() for one in sizes]
    wrapper = Wrapper()
    wrapper._pg = dist.group.WORLD
    for group in (wrapper._pg, wrapper):
        output = torch.full((sum(numels),), torch.nan)
        options: Any = dist.ReduceScatterOptions()
        options.reduceOp = dist.ReduceOp.SUM
        reduce_scatter_quantized(output, inputs, options, group, scheme=scheme).wait()
        for place, part in enumerate(output.split(numels)):
            exact: Any = sum(_tensors(other, 0)[place] for other in range(world_size))
            rows = exact[rank * sizes[place][0] : (rank + 1) * sizes[place][0]]
            expected = torch.zeros(sizes[place])
            expected[: len(rows)] = rows
            error = float((part.view(sizes[place]) - expected).norm() / expected.norm())
            assert error <= allowed, place
    assert equal_bits([torch.cat([one.view(-1) for one in inputs])] * 2)


@pytest.mark.parametrize("scheme", ["none", "int8", "fp8"])
def test_each_rank_gets_its_rows_of_each_tensor(scheme: str) -> None:
    run_ranks(_scattered, 3, scheme, {"none": 1e-6, "int8": 0.02, "fp8": 0.05}[scheme])


def _quantized_refused(rank: int, world_size: int) -> None:
    group: Any = dist.group.WORLD
    one = torch.ones(2000)
    with pytest.raises(MismatchError, match="scheme"):
        allreduce_quantized([one], dist.ReduceOp.SUM, group, scheme=("int8", "fp8")[rank])
    with pytest.raises(RegistrationError, match="does not name tensors"):
        allreduce_quantized([one], dist.ReduceOp.SUM, group, scheme="topk")
    with pytest.raises(ValueError, match="schemes average"):
        allreduce_quantized([one], dist.ReduceOp.MAX, group)


def test_what_torchft_cannot_have_is_refused() -> None:
    run_ranks(_quantized_refused, 2)


# ---- torchft itself

_needs_torchft = pytest.mark.skipif(
    importlib.util.find_spec("torchft") is None, reason="torchft is not installed"
)


def _manager(rank: int, address: str, module: Any, group: Any) -> Any:
    from torchft import Manager

    os.environ["REPLICA_GROUP_ID"] = str(rank)
    # A replica of torchft's has no group of torch.distributed's in common with the others.
    dist.destroy_process_group()
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager: Any = Manager(
        pg=group,
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


def _among_replicas(worker: Any, ranks: int, *args: Any, may_die: tuple[int, ...] = ()) -> Any:
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=2, join_timeout_ms=3000)
    try:
        return run_ranks(
            worker,
            ranks,
            lighthouse.address(),
            *args,
            timeout=120,
            may_die=may_die,
            ignore_warnings=(".*",),
        )
    finally:
        lighthouse.shutdown()


def _replica(rank: int, world_size: int, address: str, scheme: str) -> Any:
    from torchft import Optimizer, ProcessGroupGloo
    from torchft.process_group import ProcessGroupDummy

    module = mlp(seed=rank)
    manager = _manager(rank, address, module, ProcessGroupGloo(timeout=timedelta(seconds=5)))
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
        changes = [(one.before, one.world_size, one.lost) for one in hook.group_changes]
        return manager.current_step(), hook.step, changes, flat(module.parameters())
    finally:
        with contextlib.suppress(Exception):
            manager.shutdown(wait=False)


@_needs_torchft
@pytest.mark.parametrize("scheme", ["topk", "powersgd"])
def test_torchft_loses_a_replica_and_goes_on(scheme: str) -> None:
    found = _among_replicas(_replica, 3, scheme, may_die=(2,))
    for steps, hook_steps, changes, _ in found[:2]:
        assert steps >= 12
        assert hook_steps >= 12
        assert changes[-1][1] == 2
        assert any(lost for _, _, lost in changes)
    assert equal_bits([one[3] for one in found[:2]])


def _by_function(manager: Any, tensor: torch.Tensor) -> None:
    """Does what ``Manager.allreduce`` does on a GPU, where it quantizes."""
    manager.wait_quorum()
    if not manager.is_participating():
        tensor.zero_()
    try:
        allreduce_quantized([tensor], dist.ReduceOp.SUM, manager._pg, scheme="int8").wait()
        tensor /= manager.num_participants()
    except Exception as error:
        manager.report_error(error)


def _managed(rank: int, world_size: int, address: str, by: str) -> Any:
    """What a manager averages, by a group that compresses; or what a function reduces in one."""
    from torchft import ProcessGroupGloo

    from commhooks.hosts.torchft_group import SchemeProcessGroup

    group: Any = ProcessGroupGloo(timeout=timedelta(seconds=5))
    if by == "group":
        group = SchemeProcessGroup(group, "int8")
    manager = _manager(rank, address, mlp(), group)
    found: dict[int, Any] = {}
    try:
        for number in range(30):
            manager.start_quorum()
            ours = _tensors(rank, number)[0].view(-1)
            some = ours[:500].clone()  # fewer than are compressed
            manager.allreduce(some).wait()
            if by == "group":
                manager.allreduce(ours).wait()
            else:
                _by_function(manager, ours)
            if manager.should_commit():
                error = float((ours[:500] - some).norm() / some.norm())
                found[manager.current_step()] = (manager.num_participants(), error, ours)
            if rank == 2 and manager.current_step() == 3:
                return None  # it leaves without a word
            if manager.current_step() >= 8:
                break
        return found
    finally:
        with contextlib.suppress(Exception):
            manager.shutdown(wait=False)


@_needs_torchft
@pytest.mark.parametrize("by", ["group", "function"])
def test_a_manager_averages_by_a_scheme_and_loses_a_replica(by: str) -> None:
    found = _among_replicas(_managed, 3, by, may_die=(2,))[:2]
    for one in found:
        assert one[max(one)][0] == 2
        assert all(0 < error < 0.03 for _, error, _ in one.values())
    common = found[0].keys() & found[1].keys()  # one may have come later
    assert len(common) > 3
    for step in common:
        assert equal_bits([one[step][2] for one in found])


def _diloco(rank: int, world_size: int, address: str) -> Any:
    from torchft import ProcessGroupGloo
    from torchft.local_sgd import DiLoCo

    from commhooks.hosts.torchft_group import SchemeProcessGroup

    group = SchemeProcessGroup(ProcessGroupGloo(timeout=timedelta(seconds=5)), "int8", least=1)
    module = mlp(seed=1)
    manager = _manager(rank, address, module, group)
    inner = torch.optim.SGD(module.parameters(), 0.01)
    outer = torch.optim.SGD(module.parameters(), 0.7, momentum=0.9, nesterov=True)
    try:
        with DiLoCo(manager, [module], inner, outer, sync_every=2):
            for number in range(20):
                inner.zero_grad()
                module(batch(number, rank, 4, 16)).square().sum().backward()
                inner.step()
                if manager.current_step() >= 3:
                    break
        return manager.current_step(), flat(module.parameters())
    finally:
        with contextlib.suppress(Exception):
            manager.shutdown(wait=False)


@_needs_torchft
def test_torchfts_diloco_exchanges_by_a_scheme() -> None:
    found = _among_replicas(_diloco, 2)
    assert [steps for steps, _ in found] == [3, 3]
    assert equal_bits([values for _, values in found])


@_needs_torchft
def test_a_group_that_compresses_refuses_what_torchft_cannot_have() -> None:
    from torchft import ProcessGroupGloo

    from commhooks.hosts.torchft_group import SchemeProcessGroup

    for name, why in {"topk": "keeps memory", "signsgd": "returns no mean"}.items():
        with pytest.raises(RegistrationError, match=why):
            SchemeProcessGroup(ProcessGroupGloo(), name)
