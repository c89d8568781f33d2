"""Hosts on a device with streams: memory that is given back, and streams that nobody waits for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import commhooks
from commhooks.core._layout import Layout
from commhooks.fsdp._fsdp2 import ReplicaAllReduce, SchemeReduceScatter
from commhooks.hook._engine import Engine
from commhooks.hook._ledger import Ledger
from commhooks.hook._parameters import Parameters
from commhooks.hook._sharded import OwnShards, ShardedParameter, ShardedParameters
from commhooks.zero._shards import Gather, Shards
from ddp_core import Drivers
from tests.device.deferred_device import LazyDevice, LazyTensor, Order, lazy_device
from tests.device.loopback import loopback

SIZE = 256  # entries of every tensor


pytestmark = pytest.mark.usefixtures("one_rank")


def numbers(seed: int) -> Tensor:
    """Numbers on the device, copied behind what the current stream does."""
    values = torch.randn(SIZE, generator=torch.Generator().manual_seed(seed))
    there = torch.empty_like(values, device="meta")
    there.copy_(values, non_blocking=True)
    return there


def assert_same(left: list[Tensor], right: list[Tensor]) -> None:
    assert len(left) == len(right)
    for tensor, other in zip(left, right, strict=True):
        assert tensor.isfinite().all()
        assert torch.equal(tensor, other)


# ---- calls


def called(order: Order, kind: str) -> list[Tensor]:
    """Results of calls whose inputs the caller frees at once."""
    with lazy_device(order) as machine, loopback(machine):
        run = commhooks.Collectives("int8", block=32, error_feedback=False)
        handles = []
        for number in range(4):
            output = torch.empty(SIZE, dtype=torch.float32, device="meta")
            handle = getattr(run, kind)(output, numbers(number), async_op=True)
            handles.append((handle, output))
            torch.zeros(SIZE, device="meta")  # in the memory of the input
        results = []
        for handle, output in reversed(handles):
            handle.wait()
            results.append(machine.read(output))
        run.close()
    return results


@pytest.mark.parametrize("order", ["late", "early"])
@pytest.mark.parametrize("kind", ["reduce_scatter", "all_gather"])
def test_a_caller_may_give_back_what_a_call_reads(kind: str, order: Order) -> None:
    assert_same(called(order, kind), called("at once", kind))


@pytest.mark.parametrize("async_op", [False, True])
def test_only_a_call_that_is_not_waited_for_keeps_its_memory_from_others(async_op: bool) -> None:
    with lazy_device("late") as machine, loopback(machine):
        run = commhooks.Collectives("int8", block=32, error_feedback=False)
        part = numbers(0)
        with machine.stream(machine.Stream()):
            whole = torch.empty(SIZE, dtype=torch.float32, device="meta")
        handle = run.all_gather(whole, part, async_op=async_op)
        if handle is not None:
            handle.wait()
        for tensor in (whole, part):
            assert isinstance(tensor, LazyTensor)
            assert tensor.memory._recorded == async_op
        run.close()


def test_a_call_is_over_when_its_device_is() -> None:
    with lazy_device("late") as machine, loopback(machine):
        run = commhooks.Collectives("int8", block=32, error_feedback=False)
        tensor = numbers(0)
        handle = run.all_reduce(tensor, async_op=True)
        assert isinstance(handle, dist.Work)
        assert handle.get_future().done()  # all is enqueued
        assert not handle.is_completed()
        handle.wait()
        machine.read(tensor)
        machine.current.wait_event(handle._happened.__self__)  # type: ignore[union-attr]
        machine.read(tensor)
        assert handle.is_completed()
        run.close()


# ---- an optimizer in shards


def stepped(order: Order, gather: str) -> list[Tensor]:
    """Parameters of three buckets, each of which is stepped while the one before is sent."""
    with lazy_device(order) as machine, loopback(machine):
        module = nn.ParameterList([nn.Parameter(numbers(number)) for number in range(3)])
        hook: Any = SimpleNamespace(
            scheme=commhooks.make("none"),
            step=1,
            ledger=Ledger(),
            parameters=Parameters(module),
            engine=Engine(commhooks.make("none"), rank=0, world_size=1),
            drivers=Drivers(1),
            attach_shards=lambda *args: None,
        )
        buckets = [
            SimpleNamespace(number=number, parameters=[parameter])
            for number, parameter in enumerate(module)
        ]
        model: Any = SimpleNamespace(
            process_group=dist.group.WORLD,
            _ddp_state=SimpleNamespace(before_collectives=lambda: None),
            reducer=SimpleNamespace(
                buckets=buckets, drop_raised_step=lambda: None, device=torch.device("meta")
            ),
        )
        shards = Shards(hook, model, Gather(gather), in_backward=False)
        shards.optimizer = torch.optim.SGD(shards.values(module), lr=0.1, momentum=0.9)
        results = []
        for step in range(3):
            for shard in shards._all:
                shard.arrived = True
            shards._placeholders._away.update(
                module
            )  # their gradients have come, and were made room for
            for number, piece in enumerate(shards.pieces()):
                piece.value.grad = numbers(10 * step + number)
            with torch.no_grad():
                shards.step()
            assert all(shard.arrived for shard in shards._all)
            results += [machine.read(parameter.detach()) for parameter in module]
    return results


@pytest.mark.parametrize("order", ["late", "early"])
@pytest.mark.parametrize("gather", ["none", "int8", "onebit"])
def test_a_bucket_is_stepped_while_another_is_packed(gather: str, order: Order) -> None:
    assert_same(stepped(order, gather), stepped("at once", gather))


# ---- FSDP2, by the streams of its ``foreach_reduce``


class Module:
    """Describes a module as the adapter does, without FSDP2's objects."""

    def __init__(self, number: int) -> None:
        self.number, self.group = number, SimpleNamespace(gradient_divide_factor=None)

    def layout(self, known: ShardedParameters, numel: int, pieces: int) -> Layout:
        return known.layout_of([f"p{self.number}"])

    def gradient_scale(self, reduced: Tensor) -> float:
        return 0.5  # as if it had been divided


def reduced(machine: LazyDevice, name: str, *, between: bool, ahead: bool) -> list[Tensor]:
    """Gradients of three modules in each of three steps, accumulated in another dtype.

    Args:
        between: the hook is the one between replicas.
        ahead: the stream of the reduce-scatter runs before that of the all-reduce does.
    """
    shapes = [
        ShardedParameter(f"p{number}", torch.Size([16, 16]), torch.float32, 0, True)
        for number in range(3)
    ]
    known = OwnShards(shapes, 1, 0) if between else ShardedParameters(shapes, 1)
    model = nn.ParameterList([torch.zeros(SIZE) for _ in range(3)])
    hook = commhooks.HookState(name, process_group=dist.group.WORLD, error_feedback=True)
    here = torch.device("meta")
    hook.target.adopt_sharded(model, known, dist.group.WORLD, here)  # type: ignore[arg-type]
    hook.target.notifying_core = lambda hook: hook  # type: ignore[assignment]
    main, scatter, reduce = machine.current, machine.Stream(), machine.Stream()
    modules: list[Any] = [Module(number) for number in range(3)]
    inside = [SchemeReduceScatter(hook, module, known) for module in modules]
    hooks = [ReplicaAllReduce(hook, module, known) for module in modules]
    totals = [torch.zeros(SIZE, dtype=torch.float64, device="meta") for _ in modules]
    results = []
    for step in range(3):
        held = []  # FSDP2 holds inputs until their events
        for number in range(3):
            gradient = numbers(10 * step + number)
            held.append(gradient)
            scatter.wait_stream(main)
            with machine.stream(scatter):
                output = torch.empty(SIZE, dtype=torch.float32, device="meta")
                if between:
                    output.copy_(gradient)
                else:
                    inside[number](output, gradient, dist.group.WORLD, dist.ReduceOp.AVG)
            after = scatter
            if between:
                reduce.wait_stream(scatter)
                with machine.stream(reduce):
                    hooks[number](output)
                after = reduce
            with machine.stream(after):
                totals[number] += output.to(torch.float64)
            del output  # to the stream of the reduce-scatter, whoever has it last
            if ahead:
                scatter.run(len(scatter.queue))
        for stream in (scatter, reduce):
            main.wait_stream(stream)
        hook.gradients_written()
        results += [machine.read(total) for total in totals]
    results += [machine.read(value) for _, _, value in hook.engine.memory.items()]
    hook._close()
    return results


def reduced_in(order: Order, name: str, *, between: bool, ahead: bool = False) -> list[Tensor]:
    with lazy_device(order) as machine, loopback(machine):
        return reduced(machine, name, between=between, ahead=ahead)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("order", ["late", "early"])
@pytest.mark.parametrize(
    ("name", "between"), [("int8", False), ("onebit", False), ("fp16", True), ("powersgd", True)]
)
def test_fsdp2_reads_what_was_reduced(name: str, between: bool, order: Order, ahead: bool) -> None:
    expected = reduced_in("at once", name, between=between)
    assert_same(reduced_in(order, name, between=between, ahead=ahead), expected)
