"""Bodies of tests of DDP hooks on any device and group; at every run on the CPU with Gloo.

A body trains and returns numbers, or asserts by itself. Gradients are given, and not computed, so
that they have the same bits on every device.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel

import commhooks
import ddp_core

__all__ = ["BODIES", "CLASSES", "SCHEMES", "Given", "default_dtype", "given", "trained"]

CLASSES: dict[str, Any] = {
    "torch": DistributedDataParallel,
    "ours": ddp_core.DistributedDataParallel,
}
# Matrices and vectors; odd sizes, so that parameters begin anywhere within their bucket.
SHAPES = [(33, 7), (7,), (40, 24), (3,), (64, 48), (1,), (5, 9)]
BUCKET_MB = 0.008
# A scheme of each way of working, and its options.
SCHEMES: dict[str, tuple[str, dict[str, Any]]] = {
    "none": ("none", {}),
    "fp16": ("fp16", {}),
    "int8": ("int8", {"block": 64}),
    "int4": ("int4", {"block": 64, "error_feedback": True}),
    "onebit": ("onebit", {"block": 64}),
    "powersgd": ("powersgd", {"rank": 2}),
    "powersgd, one exchange": ("powersgd", {"rank": 2, "coalesce": True}),
    "topk": ("topk", {"ratio": 0.1}),
    "acpsgd": ("acpsgd", {"rank": 2}),
    "demo": ("demo", {}),
}
Gradients = Callable[[int, int], list[Tensor]]  # of a step and rank


class Given(nn.Module):
    """Has the gradients that it is given: its output is the sum of all products with them."""

    def __init__(self, shapes: Sequence[tuple[int, ...]] = SHAPES, unused: int = 0) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.zeros(shape) for shape in shapes])
        self.unused = unused  # parameters at the end that take no part

    def forward(self, gradients: list[Tensor]) -> Tensor:
        used = list(self.weights)[: len(self.weights) - self.unused]
        pairs = zip(used, gradients, strict=False)
        return sum((weight * gradient).sum() for weight, gradient in pairs)


def given(step: int, rank: int) -> list[Tensor]:
    """Random gradients that belong to this step and rank."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randn(shape, generator=generator, dtype=torch.float32) for shape in SHAPES]


def with_an_infinity(step: int, rank: int) -> list[Tensor]:
    """The same, but for one entry of one rank in one step."""
    gradients = given(step, rank)
    if (step, rank) == (1, 0):
        gradients[2][3, 4] = float("inf")
    return gradients


def network(cls: str, device: str, group: Any = None, *, unused: int = 0, **options: Any) -> Any:
    """A model of given gradients in DistributedDataParallel, with several buckets."""
    model = Given(unused=unused).to(device)
    return CLASSES[cls](model, process_group=group, bucket_cap_mb=BUCKET_MB, **options)


def backward(model: Any, device: str, gradients: list[Tensor]) -> None:
    """A step without an optimizer; ``.grad`` has the average afterwards."""
    model.zero_grad()
    model([grad.to(device) for grad in gradients]).backward()


def averages(model: Any) -> list[Tensor]:
    """Gradients on the CPU; zeros where there is none."""
    return [
        (torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
        .detach()
        .cpu()
        .clone()
        for parameter in model.parameters()
    ]


def trained(
    device: str,
    name: str,
    *,
    cls: str = "torch",
    group: Any = None,
    steps: int = 4,
    make: Gradients = given,
    **options: Any,
) -> list[Tensor]:
    """The averages of every step, and the residuals in the end."""
    scheme, settings = SCHEMES[name]
    model = network(cls, device, group, **options)
    hook = commhooks.register(model, scheme, process_group=group, **settings)
    results = []
    for step in range(steps):
        backward(model, device, make(step, hook.rank))
        results += averages(model)
    residuals = [hook.residual(parameter) for parameter, _ in model.module.named_parameters()]
    hook.close()
    return results + [residual.cpu() for residual in residuals if residual is not None]


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Within it, tensors are of another dtype unless they say theirs."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def another_default_dtype(device: str, name: str, group: Any = None) -> None:
    """Scripts that train large models set it; a scheme's scratch memory is float32 all the same."""
    plain = trained(device, name, group=group)
    scheme, settings = SCHEMES[name]
    model = network("torch", device, group)
    with default_dtype(torch.bfloat16):
        hook = commhooks.register(model, scheme, process_group=group, **settings)
        results = []
        for step in range(4):
            backward(model, device, given(step, hook.rank))
            results += averages(model)
        hook.close()
    for value, other in zip(results, plain, strict=False):
        assert torch.equal(value, other)


def grad_scaler(device: str, group: Any = None) -> list[Tensor]:
    """Parameters after steps of which one is not finite, by torch's scaler."""
    model = network("torch", device, group)
    hook = commhooks.register(model, "int8", process_group=group, error_feedback=True, block=64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(device, init_scale=8.0)
    for step in range(4):
        optimizer.zero_grad()
        gradients = [value.to(device) for value in with_an_infinity(step, hook.rank)]
        scaler.scale(model(gradients)).backward()
        before = [parameter.detach().clone() for parameter in model.parameters()]
        scaler.step(optimizer)
        scaler.update()
        same = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        assert same == (step == 1), step
    assert scaler.get_scale() == 4.0
    residuals = [hook.residual(parameter) for parameter, _ in model.module.named_parameters()]
    hook.close()
    assert all(residual is not None and residual.isfinite().all() for residual in residuals)
    return [parameter.detach().cpu() for parameter in model.parameters()]


def saved_and_switched(device: str, name: str, group: Any = None) -> None:
    """A run that is saved, loaded and continued gives the bits of one that goes on."""
    scheme, settings = SCHEMES[name]
    model = network("torch", device, group)
    hook = commhooks.register(model, scheme, process_group=group, **settings)
    for step in range(2):
        backward(model, device, given(step, hook.rank))
    state = copy.deepcopy(hook.state_dict())
    other = network("torch", device, group)
    backward(other, device, given(0, hook.rank))  # torch settles its buckets in the first step
    again = commhooks.register(other, scheme, process_group=group, **settings)
    again.load_state_dict(state)
    for step in range(2, 6):
        if step == 4:
            hook.switch("onebit", block=64)
            again.switch("onebit", block=64)
        results = []
        for value in (model, other):
            backward(value, device, given(step, hook.rank))
            results.append(averages(value))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)), step
    hook.close()
    again.close()


def optimizer_in_backward(device: str, group: Any = None) -> None:
    """Stepping each bucket when it is averaged is stepping all of them at the end."""
    ends = []
    for early in (False, True):
        model = Given().to(device)
        if early:
            _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
        ddp = CLASSES["ours"](model, process_group=group, bucket_cap_mb=BUCKET_MB)
        hook = commhooks.register(ddp, "int8", process_group=group, block=64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            ddp([value.to(device) for value in given(step, hook.rank)]).backward()
            if not early:
                optimizer.step()
        ends.append([parameter.detach().clone() for parameter in model.parameters()])
        hook.close()
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def held(device: str, group: Any = None) -> None:
    """A reduction at a named point gives what the end of backward gives."""
    results: list[list[Tensor]] = []
    for holds in (False, True):
        model = network("ours", device, group)
        hook = commhooks.register(model, "int8", process_group=group, block=64)
        results.append([])
        for step in range(3):
            model.zero_grad()
            with model.hold() if holds else nullcontext():
                model([value.to(device) for value in given(step, hook.rank)]).backward()
            if holds:
                model.reduce()
            results[-1] += averages(model)
        hook.close()
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def unused_parameters(device: str, name: str, group: Any = None) -> None:
    """Parameters without a gradient get none, and the others theirs, with a hook as well."""
    for cls in CLASSES:
        results = trained(device, name, cls=cls, group=group, unused=2, find_unused_parameters=True)
        each = len(SHAPES)
        for step in range(4):
            for unused in results[step * each + each - 2 : (step + 1) * each]:
                assert not unused.any()
            assert all(value.any() for value in results[step * each : (step + 1) * each - 2])


def diloco(device: str, group: Any = None) -> list[Tensor]:
    """Parameters after two rounds of local steps."""
    model = Given().to(device)
    rank = dist.get_rank(group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    outer = commhooks.DiLoCo(model, "int8", every=2, process_group=group, block=64)
    for step in range(4):
        optimizer.zero_grad()
        model([value.to(device) for value in given(step, rank)]).backward()
        optimizer.step()
        outer.step()
    outer.close()
    return [parameter.detach().cpu() for parameter in model.parameters()]


def called(device: str, group: Any = None) -> None:
    """Calls by functions and by name: at once or later, saved or not, and near torch's own."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    for name in ("topk", "int4", "powersgd"):
        scheme, settings = SCHEMES[name]
        runs = [commhooks.Collectives(scheme, group, **settings) for _ in range(3)]
        for step in range(4):
            if step == 2:
                runs[2].load_state_dict(copy.deepcopy(runs[0].state_dict()))
            results = []
            for place, run in enumerate(runs[: 2 if step < 2 else 3]):
                tensors = [value.to(device) for value in given(step, rank)]
                for number, tensor in enumerate(tensors):
                    run.all_reduce(tensor, f"p{number}", async_op=place == 1)
                run.wait()
                results.append([tensor.cpu() for tensor in tensors])
            assert all(
                torch.equal(*pair)
                for value in results
                for pair in zip(value, results[0], strict=True)
            )
        for run in runs:
            run.close()
    inputs = torch.cat([value.flatten() for value in given(0, rank)])[:3072].to(device)
    total, ours = inputs.clone(), inputs.clone()
    dist.all_reduce(total, group=group)
    commhooks.all_reduce(ours, "int8", group=group)
    assert (ours - total).norm() < 0.03 * total.norm()
    n = len(inputs) // world_size
    part, whole = inputs.new_empty(n), inputs.new_empty(n * world_size)
    commhooks.reduce_scatter(part, inputs[: n * world_size], "int8", group=group)
    commhooks.all_gather(whole, part, "int8", group=group)
    assert (whole - total[: n * world_size]).norm() < 0.03 * total.norm()


def through_a_group(device: str, group: Any = None) -> None:
    """A model without a hook over a group that runs a scheme gets what a hook gives."""
    through = commhooks.process_group("bf16", group, least=1, fp32_sum=True)
    model, other = network("torch", device, through), network("torch", device, group)
    plain = commhooks.register(other, "bf16", process_group=group, fp32_sum=True)
    for step in range(4):
        results = []
        for value in (model, other):
            backward(value, device, given(step, plain.rank))
            results.append(averages(value))
        if plain.world_size <= 2:  # else dividing and multiplying by the ranks rounds
            assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)), step
    assert through.hook.calls > 0
    plain.close()


def verified(device: str, name: str, group: Any = None) -> None:
    """Verified steps accuse no scheme, and name the ranks whose parameters differ."""
    scheme, settings = SCHEMES[name]
    for cls in CLASSES:
        model = network(cls, device, group)
        hook = commhooks.register(model, scheme, process_group=group, verify=2, **settings)
        verification = hook.verification
        for step in range(5):
            if step == 4 and hook.rank:
                with torch.no_grad():
                    model.module.weights[2][5, 7] += 1.0
            backward(model, device, given(step, hook.rank))
            if step == 2:
                errors = [row.error for row in verification.latest(wait=True)]
                assert len(errors) == len(SHAPES)
                assert 0 < max(errors) < 1.5
                assert not verification.findings
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it tells of what is asserted here
            verification.latest(wait=True)
            findings = [(finding.kind, finding.parameter) for finding in verification.findings]
            several = hook.world_size > 1
            assert findings == [("parameters differ", "weights.2")] * several, findings
            hook.close()


BODIES: dict[str, Callable[..., Any]] = {
    "another default dtype": lambda *a: another_default_dtype(a[0], "powersgd", *a[1:]),
    "grad scaler": grad_scaler,
    "saved and switched": lambda *a: saved_and_switched(a[0], "powersgd", *a[1:]),
    "optimizer in backward": optimizer_in_backward,
    "held": held,
    "unused parameters": lambda *a: unused_parameters(a[0], "int8", *a[1:]),
    "diloco": diloco,
    "called": called,
    "through a group": through_a_group,
    "verified": lambda *a: [verified(a[0], name, *a[1:]) for name in ("int8", "int4")],
}
