"""ddp_core's DistributedDataParallel against torch's: equal bits in everything a user can do."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from packaging.version import Version
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    post_localSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import (
    PostLocalSGDOptimizer,
    ZeroRedundancyOptimizer,
)
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import commhooks
import ddp_core
from tests.tools import models
from tests.tools.harness import on_ranks
from tests.tools.models import loss_of
from tests.tools.training import CONFIGS, THOROUGH, batch, gradients, parameters

# torch's own remarks: on the search for unused parameters, strides, deprecated arguments.
REMARKS = ("find_unused", "Grad strides", ".*deprecated", ".*static_graph", "You passed find_un")


@dataclass(frozen=True)
class Case:
    """A model, its inputs at a step on a rank, and how it is wrapped and trained."""

    model: Callable[[], nn.Module]
    inputs: Callable[[int, int], tuple[Any, ...]]
    options: dict[str, Any] = field(default_factory=dict)
    micro_batches: int = 1
    set_to_none: bool = True
    lr: float = 0.05


def rows(step: int, rank: int) -> tuple[Any, ...]:
    return (batch(step, rank, 8, 16),)


def images(step: int, rank: int) -> tuple[Any, ...]:
    return (batch(step, rank, 2, 3, 8, 8),)


def tokens(step: int, rank: int) -> tuple[Any, ...]:
    return ((batch(step, rank, 2, 12) * 1e4).long() % 40,)


def ids(step: int, rank: int) -> tuple[Any, ...]:
    return ((batch(step, rank, 8) * 1e4).long() % 20,)


def branch(step: int, rank: int) -> tuple[Any, ...]:
    return batch(step, rank, 8, 16), (step // 2 + rank) % 3


def channels_last() -> nn.Module:
    return models.Cnn().to(memory_format=torch.channels_last)


VIEW = {"gradient_as_bucket_view": True}
UNUSED = {"find_unused_parameters": True}
STATIC = {"static_graph": True}

CASES = {
    "cnn": Case(models.Cnn, images),
    "cnn-view": Case(models.Cnn, images, VIEW),
    "cnn-static": Case(models.Cnn, images, STATIC),
    "cnn-own-buffers": Case(models.Cnn, images, {"broadcast_buffers": False}),
    "cnn-small-first-bucket": Case(models.Cnn, images, {"bucket_cap_mb": None}),
    "channels-last": Case(channels_last, images),
    "channels-last-view": Case(channels_last, images, VIEW),
    "transformer-tied": Case(models.TiedTransformer, tokens),
    "transformer-tied-view": Case(models.TiedTransformer, tokens, VIEW),
    "transformer-tied-static": Case(models.TiedTransformer, tokens, STATIC | VIEW),
    "frozen": Case(models.frozen_part, rows),
    "unused": Case(models.Branches, branch, UNUSED),
    "unused-view": Case(models.Branches, branch, UNUSED | VIEW),
    "unused-kept-gradients": Case(models.Branches, branch, UNUSED, set_to_none=False),
    "unused-view-kept-gradients": Case(models.Branches, branch, UNUSED | VIEW, set_to_none=False),
    "unused-accumulated": Case(models.Branches, branch, UNUSED, micro_batches=2),
    "checkpoint": Case(partial(models.Checkpointed, reentrant=False), rows, UNUSED),
    "checkpoint-static": Case(partial(models.Checkpointed, reentrant=True), rows, STATIC),
    "checkpoint-static-view": Case(
        partial(models.Checkpointed, reentrant=True), rows, STATIC | VIEW
    ),
    "accumulated": Case(models.Cnn, images, micro_batches=3),
    "accumulated-view": Case(models.Cnn, images, VIEW, micro_batches=3),
    "kept-gradients": Case(models.Cnn, images, set_to_none=False),
    "kept-gradients-view": Case(models.Cnn, images, VIEW, set_to_none=False),
    "accumulated-kept-view": Case(models.Cnn, images, VIEW, micro_batches=2, set_to_none=False),
    "sparse": Case(models.Embedded, ids),
    "sparse-static": Case(models.Embedded, ids, STATIC),
    "many-types": Case(models.ManyTypes, rows, lr=0.001),
    "many-types-view": Case(models.ManyTypes, rows, VIEW, lr=0.001),
}


def build(cls: type[TorchDDP], case: Case) -> TorchDDP:
    torch.manual_seed(dist.get_rank())  # the ranks start differently: rank 0's values count
    return cls(case.model(), **{"bucket_cap_mb": 0.01, **case.options})


def backward(model: nn.Module, case: Case, step: int, rank: int) -> None:
    for micro in range(case.micro_batches):
        last = micro == case.micro_batches - 1
        with contextlib.nullcontext() if last else model.no_sync():  # type: ignore[operator]
            loss_of(model(*case.inputs(step + 1000 * micro, rank))).backward()


def trajectory(cls: type[TorchDDP], case: Case, rank: int, steps: int) -> Iterator[Tensor]:
    """Gradients of the first steps, parameters and buffers of all."""
    model = build(cls, case)
    optimizer = torch.optim.SGD(model.parameters(), lr=case.lr, momentum=0.9)
    if any(isinstance(m, nn.Embedding) and m.sparse for m in model.modules()):
        optimizer = torch.optim.SGD(model.parameters(), lr=case.lr)
    for step in range(steps):
        optimizer.zero_grad(set_to_none=case.set_to_none)
        backward(model, case, step, rank)
        yield gradients(model)
        yield torch.tensor([p.grad is None for p in model.parameters()])
        optimizer.step()
        yield parameters(model)
        yield torch.cat([b.reshape(-1).double() for b in model.buffers()] or [torch.zeros(0)])


# Buckets are rebuilt in the second step, and everything has met everything after some more.
@pytest.mark.parametrize("name", CASES)
@on_ranks(3, ignore_warnings=REMARKS)
def test_twelve_steps_have_the_bits_of_torch(rank: int, name: str) -> None:
    case = CASES[name]
    # One after the other: the two models' collectives must not mix.
    torch_results = list(trajectory(TorchDDP, case, rank, 12))
    core_results = list(trajectory(ddp_core.DistributedDataParallel, case, rank, 12))
    for number, (expected, actual) in enumerate(zip(torch_results, core_results, strict=True)):
        differs = ("gradients", "absent gradients", "parameters", "buffers")[number % 4]
        assert torch.equal(expected, actual), f"step {number // 4}: {differs} differ"


# ---- what is done around the step


def recorded_steps(
    model: nn.Module,
    rank: int,
    steps: range,
    *,
    inputs: Callable[[int, int], tuple[Any, ...]] = rows,
    loss: Callable[[int], Tensor] | None = None,
    optimizer: Any = None,
) -> list[Tensor]:
    """Trains; ``loss`` takes a step, in place of a forward pass with the inputs."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen = []
    for step in steps:
        optimizer.zero_grad()
        (loss_of(model(*inputs(step, rank))) if loss is None else loss(step)).backward()
        seen += [gradients(model), torch.tensor([p.grad is None for p in model.parameters()])]
        optimizer.step()
    return [*seen, parameters(model), *(buffer.double() for buffer in model.buffers())]


def net() -> nn.Module:
    torch.manual_seed(dist.get_rank())
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Linear(64, 16))


def cnn() -> nn.Module:
    torch.manual_seed(dist.get_rank())
    return models.Cnn()


def two_forwards(cls, rank):
    model = cls(net(), bucket_cap_mb=0.01)

    def loss(step):
        return loss_of(tuple(model(*rows(10 * step + i, rank)) for i in range(2)))

    return recorded_steps(model, rank, range(4), loss=loss)


def one_of_two_outputs(cls, rank):
    torch.manual_seed(0)
    model = cls(models.SometimesUnused(), find_unused_parameters=True)

    def loss(step):
        outputs = model(*rows(step, rank))
        return loss_of(outputs[step % 2] if step < 4 else outputs)

    return recorded_steps(model, rank, range(6), loss=loss)


def gradient_penalty(cls, rank):
    """A penalty on the gradient of the input: backward goes through a backward."""
    model = cls(net(), bucket_cap_mb=0.01)

    def loss(step):
        x = rows(step, rank)[0].requires_grad_()
        loss = loss_of(model(x))
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + slope.square().sum()

    return recorded_steps(model, rank, range(3), loss=loss)


def two_losses(cls, rank):
    """Two backward passes that reach different parameters are one step."""
    torch.manual_seed(0)
    inner = models.SometimesUnused()
    for parameter in inner.idle.parameters():
        parameter.requires_grad_(False)
    model = cls(inner)

    def loss(step):
        left, right = model(*rows(step, rank))
        loss_of(left).backward()
        return loss_of(right)

    return recorded_steps(model, rank, range(3), loss=loss)


def evaluation_between(cls, rank):
    model = cls(cnn(), bucket_cap_mb=0.01)
    outputs = []

    def loss(step):
        model.eval()
        with torch.no_grad():
            outputs.append(model(*images(100 + step, 0)))
        model.train()
        return loss_of(model(*images(step, rank)))

    return [*recorded_steps(model, rank, range(3), loss=loss), *outputs]


def ignored(cls, rank):
    module = net()
    cls._set_params_and_buffers_to_ignore_for_model(module, ["2.weight"])
    return recorded_steps(cls(module), rank, range(4))


def no_start_sync(cls, rank):
    torch.manual_seed(0)
    module = nn.Linear(16, 16)
    return recorded_steps(cls(module, init_sync=False), rank, range(3))


def capacity_list(cls, rank):
    model = cls(net(), bucket_cap_mb_list=[0.001, 0.02])
    seen = recorded_steps(model, rank, range(4))
    sizes = model._get_ddp_logging_data()["bucket_sizes"]
    return [*seen, torch.tensor([float(size) for size in sizes.split(", ")])]


def skips_unused(cls, rank):
    torch.manual_seed(0)
    model = cls(
        models.SometimesUnused(),
        find_unused_parameters=True,
        skip_all_reduce_unused_params=True,
        bucket_cap_mb=0.0001,
    )
    return recorded_steps(model, rank, range(4))


def delayed(cls, rank):
    module = net()
    first, last = module[0], module[3]
    model = cls(
        module,
        delay_all_reduce_named_params=[(f"3.{n}", p) for n, p in last.named_parameters()],
        param_to_hook_all_reduce=first.weight,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model(*rows(step, rank))).backward()
        dist.barrier()  # torch does not wait for the delayed all-reduce
        optimizer.step()
    return parameters(model)


def sub_group(cls, rank):
    pairs = [dist.new_group([0]), dist.new_group([1])]
    return recorded_steps(cls(net(), process_group=pairs[rank]), rank, range(3))


def another_group(cls, rank):
    """Elastic training: the same module goes on with other ranks."""
    pairs = [dist.new_group([0]), dist.new_group([1])]
    model = cls(cnn(), process_group=pairs[rank], bucket_cap_mb=0.01)
    everybody = dist.group.WORLD

    def loss(step):
        if step == 3:
            model._update_process_group(everybody)
        return loss_of(model(*images(step, rank)))

    return recorded_steps(model, rank, range(6), loss=loss)


def mesh(cls, rank):
    device_mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    return recorded_steps(cls(net(), device_mesh=device_mesh), rank, range(3))


def deep_copy(cls, rank):
    model = cls(net(), bucket_cap_mb=0.01)
    recorded_steps(model, rank, range(3))
    copied = copy.deepcopy(model)
    loaded = pickle.loads(pickle.dumps(model))
    return [recorded_steps(replica, rank, range(3, 6)) for replica in (model, copied, loaded)]


def join(cls, rank, divide, hook):
    model = cls(cnn(), bucket_cap_mb=0.01)
    if hook:
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    with model.join(divide_by_initial_world_size=divide):
        seen = recorded_steps(model, rank, range(3 + 2 * rank), inputs=images)
    return [*seen, parameters(model), *(buffer.double() for buffer in model.buffers())]


def join_unused(cls, rank):
    torch.manual_seed(0)
    model = cls(models.Branches(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with model.join():
        recorded_steps(model, rank, range(3 + 2 * rank), inputs=branch, optimizer=optimizer)
    return parameters(model)


def join_throws(cls, rank):
    model = cls(net())
    steps = 0
    with (
        contextlib.suppress(RuntimeError),
        model.join(throw_on_early_termination=True),
    ):
        for step in range(3 + 2 * rank):
            loss_of(model(*rows(step, rank))).backward()
            steps += 1
    return torch.tensor(float(steps))


def buffer_hook(cls, rank, before):
    location = type("Location", (), {"name": "PRE_FORWARD" if before else "POST_FORWARD"})
    if cls is TorchDDP:
        from torch.nn.parallel.distributed import _BufferCommHookLocation

        location = getattr(_BufferCommHookLocation, location.name)

    def average(state, buffers):
        futures = []
        for _, buffer in sorted(buffers.items()):
            if buffer.is_floating_point():
                buffer.div_(dist.get_world_size())
                futures.append(dist.all_reduce(buffer, async_op=True).get_future())
        if before:
            torch.futures.wait_all(futures)
            return None
        return futures

    model = cls(cnn(), bucket_cap_mb=0.01)
    model._register_buffer_comm_hook(None, average, location)
    seen = recorded_steps(model, rank, range(4), inputs=images)
    assert cls is TorchDDP or not model.reducer.exchange._futures  # forgotten with their step
    return seen


def torch_hook(cls, rank, name):
    model = cls(net(), bucket_cap_mb=0.01)
    hook = {
        "allreduce": default_hooks.allreduce_hook,
        "fp16": default_hooks.fp16_compress_hook,
        "noop": debugging_hooks.noop_hook,
    }[name]
    model.register_comm_hook(None, hook)
    return recorded_steps(model, rank, range(6))


def builtin_hook(cls, rank, name):
    model = cls(net(), bucket_cap_mb=0.01)
    model._register_builtin_comm_hook(getattr(dist.BuiltinCommHookType, name))
    return recorded_steps(model, rank, range(6))


def fused_optimizer(cls, rank):
    model = cls(net(), bucket_cap_mb=0.01)
    model._register_fused_optim(torch.optim.SGD, 0.1)
    for step in range(6):
        loss_of(model(*rows(step, rank))).backward()
    return parameters(model)


def zero(cls, rank, as_view):
    model = cls(net(), bucket_cap_mb=0.01)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.Adam, lr=0.01, parameters_as_bucket_view=as_view
    )
    seen = recorded_steps(model, rank, range(5), optimizer=optimizer)
    optimizer.consolidate_state_dict(0)
    return seen


def post_local_sgd(cls, rank):
    model = cls(net(), bucket_cap_mb=0.01)
    alone, _ = dist.new_subgroups(group_size=1)
    state = post_localSGD_hook.PostLocalSGDState(None, alone, start_localSGD_iter=4)
    model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    optimizer = PostLocalSGDOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        PeriodicModelAverager(period=3, warmup_steps=4),
    )
    return recorded_steps(model, rank, range(12), optimizer=optimizer)


def hierarchical_averaging(cls, rank):
    from collections import OrderedDict

    from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import (
        HierarchicalModelAverager,
    )

    model = cls(net(), bucket_cap_mb=0.01)
    averager = HierarchicalModelAverager(
        period_group_size_dict=OrderedDict([(2, 2)]), warmup_steps=2
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(8):
        optimizer.zero_grad()
        with contextlib.nullcontext() if step < 2 else model.no_sync():
            loss_of(model(*rows(step, rank))).backward()
        optimizer.step()
        averager.average_parameters(model.parameters())
    return parameters(model)


class Fragile(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        if x.isnan().any():
            raise ArithmeticError("on purpose")
        return self.last(torch.tanh(self.first(x)))


def error_in_forward(cls, rank):
    torch.manual_seed(0)
    model = cls(Fragile(), bucket_cap_mb=0.001)

    def loss(step):
        with contextlib.suppress(ArithmeticError):
            model(torch.full((2, 16), torch.nan))
        return loss_of(model(*rows(step, rank)))

    return recorded_steps(model, rank, range(4), loss=loss)


SCENARIOS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    scenario.__name__: (scenario, ())
    for scenario in (
        two_forwards,
        one_of_two_outputs,
        gradient_penalty,
        two_losses,
        evaluation_between,
        ignored,
        no_start_sync,
        capacity_list,
        skips_unused,
        delayed,
        sub_group,
        another_group,
        mesh,
        deep_copy,
        join_unused,
        join_throws,
        fused_optimizer,
        post_local_sgd,
        hierarchical_averaging,
        error_in_forward,
    )
}
SCENARIOS |= {
    "join": (join, (True, False)),
    "join-hook": (join, (True, True)),
    "join-by-ranks-with-input": (join, (False, False)),
    "buffer-hook-before": (buffer_hook, (True,)),
    "buffer-hook-after": (buffer_hook, (False,)),
    "hook-allreduce": (torch_hook, ("allreduce",)),
    "hook-fp16": (torch_hook, ("fp16",)),
    "hook-noop": (torch_hook, ("noop",)),
    "builtin-allreduce": (builtin_hook, ("ALLREDUCE",)),
    "builtin-fp16": (builtin_hook, ("FP16_COMPRESS",)),
    "zero": (zero, (False,)),
    "zero-view": (zero, (True,)),
}


# Torch's own class of 2.11 overwrites buffers that its backward pass needs.
NOT_IN_OLD_TORCH = {"buffer-hook-after"} if Version(torch.__version__) < Version("2.12") else set()


@pytest.mark.parametrize("name", SCENARIOS)
@on_ranks(2, ignore_warnings=(*REMARKS, "Detected uneven"))
def test_a_scenario_ends_with_the_bits_of_torch(rank: int, name: str) -> None:
    if name in NOT_IN_OLD_TORCH:
        return
    scenario, args = SCENARIOS[name]
    torch_results = scenario(TorchDDP, rank, *args)
    core_results = scenario(ddp_core.DistributedDataParallel, rank, *args)
    torch.testing.assert_close(core_results, torch_results, rtol=0, atol=0)


# ---- hooks of commhooks

HOOK_CASES = {
    "plain": Case(models.frozen_part, rows),
    "view": Case(models.frozen_part, rows, VIEW),
    "unused": Case(models.Branches, branch, UNUSED),
    "static": Case(models.TiedTransformer, tokens, STATIC),
    "accumulated": Case(models.frozen_part, rows, micro_batches=2),
    "sparse": Case(models.Embedded, ids),
    "channels-last": Case(channels_last, images),
    "many-types": Case(models.ManyTypes, rows, lr=0.001),
}


def _hooked(cls: type[TorchDDP], case: Case, rank: int, config: str) -> list[Tensor]:
    scheme, options = CONFIGS[config]
    model = build(cls, case)
    hook = commhooks.register(model, scheme, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=case.lr)
    seen = []
    for step in range(6):
        optimizer.zero_grad()
        backward(model, case, step, rank)
        seen.append(gradients(model))
        optimizer.step()
    assert hook.step == 6
    hook.close()
    return seen


@pytest.mark.parametrize("name", HOOK_CASES)
@on_ranks(2, ignore_warnings=REMARKS, timeout=110)
def test_every_scheme_trains_as_on_torch(rank: int, name: str) -> None:
    case = HOOK_CASES[name]
    for config in CONFIGS if name in ("view", "many-types") else sorted(THOROUGH):
        torch_results = _hooked(TorchDDP, case, rank, config)
        core_results = _hooked(ddp_core.DistributedDataParallel, case, rank, config)
        for step, (expected, actual) in enumerate(zip(torch_results, core_results, strict=True)):
            assert torch.equal(expected, actual), f"{config}, step {step}"
