"""Training of the distributed tests: small models, batches keyed by step and rank, schemes."""

from __future__ import annotations

import importlib
import io
import pkgutil
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import commhooks
from commhooks import schemes
from commhooks.checkpoint._format import checksum
from tests.shelf import BUILT_IN

for _module in pkgutil.iter_modules(schemes.__path__):  # all schemes, imported by commhooks or not
    importlib.import_module(f"{schemes.__name__}.{_module.name}")

# A scheme and its options, by a name for the test's id. Small matrices are compressed too.
STATEFUL: dict[str, tuple[str, dict[str, Any]]] = {
    "powersgd": ("powersgd", {"rank": 2}),
    "powersgd-late": ("powersgd", {"rank": 2, "start_step": 3}),
    "powersgd-fp16": ("powersgd", {"rank": 2, "wire_dtype": "fp16"}),
    "powersgd-coalesced": ("powersgd", {"rank": 2, "coalesce": True}),
    "batched": ("batched_powersgd", {"rank": 1}),
    "fp16-feedback": ("fp16", {"error_feedback": True}),
    "acpsgd": ("acpsgd", {"rank": 2}),
    "int4": ("int4", {"block": 64}),
    "onebit": ("onebit", {"block": 64}),
    "topk": ("topk", {"ratio": 0.1}),
    "sdp4bit": ("sdp4bit", {"local_size": 2, "inside_block": 64, "between_block": 64}),
    "dgc": ("dgc", {"ratio": 0.1}),
    "demo": ("demo", {}),
    "onebit_adam": ("onebit_adam", {"freeze_step": 2, "block": 64}),
}
# They send as others do and differ in arithmetic only, which tests/contract goes through.
ALIKE = {"fp8", "sdp4bit"}
# They keep something else than a residual: there is no sum to look at.
OTHERS = {"demo", "dgc", "onebit_adam", "sdp4bit"}


def _averages(scheme: commhooks.Scheme) -> bool:
    return scheme.traits.returns == "mean"


# With feedback the sum over steps is exact, at random levels too.
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        name: (name, {"error_feedback": True} if commhooks.make(name).traits.error.variance else {})
        for name in BUILT_IN
        if _averages(commhooks.make(name)) and name not in ALIKE
    },
    "fp16-sum32": ("fp16", {"fp32_sum": True}),
    "bf16-sum32": ("bf16", {"fp32_sum": True}),
    **{name: config for name, config in STATEFUL.items() if name not in OTHERS},
}
# Those that travel in ways of their own: they meet every mode and model, the others some.
THOROUGH = {"none", "fp16", "bf16-sum32", "powersgd", "batched", "fp16-feedback", "int8", "topk"}


def mlp(width: int = 16, depth: int = 3, seed: int = 0) -> nn.Module:
    """Linear layers with tanh between, the same on every rank."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.Tanh()]
    return nn.Sequential(*layers)


def batch(step: int, rank: int, *shape: int) -> Tensor:
    """A random batch that belongs to this step and rank."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1000 * step + rank + 1))


def ddp(module: nn.Module, bucket_kb: float = 2.0, **options: Any) -> DistributedDataParallel:
    """The module in DistributedDataParallel with buckets of about ``bucket_kb`` KiB."""
    return DistributedDataParallel(module, bucket_cap_mb=bucket_kb / 1024, **options)


def flat(tensors: Any) -> Tensor:
    """All tensors one after the other: this rank's part, sparse as dense, complex as pairs."""
    parts = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    parts = [part.detach().to_dense() if part.is_sparse else part.detach() for part in parts]
    parts = [torch.view_as_real(part) if part.is_complex() else part for part in parts]
    return torch.cat([part.reshape(-1).to(torch.float64) for part in parts])


def parameters(model: nn.Module) -> Tensor:
    """All parameters, flat."""
    return flat(model.parameters())


def gradients(model: nn.Module) -> Tensor:
    """All gradients of trained parameters, flat; zero where there is none."""
    return flat(
        torch.zeros_like(p) if p.grad is None else p.grad
        for p in model.parameters()
        if p.requires_grad
    )


def train(
    model: nn.Module, rank: int, steps: Iterable[int], *, lr: float = 0.0, width: int = 16
) -> list[Tensor]:
    """Returns the gradients of each step, flat; without a rate, parameters stay as they are."""
    results = []
    for step in steps:
        model.zero_grad()
        model(batch(step, rank, 8, width)).square().sum().backward()
        results.append(gradients(model))
        assert results[-1].any(), "a step has given no gradient"
        if lr:
            torch.optim.SGD(model.parameters(), lr=lr).step()
    return results


def residuals(hook: commhooks.HookState, model: nn.Module) -> Tensor:
    """Returns the local residuals in the order of ``gradients``; zero where there is none."""
    parts = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            residual = hook.residual(name.removeprefix("module."))
            parts.append(torch.zeros_like(parameter) if residual is None else residual)
    return flat(parts)


def averaged(tensor: Tensor) -> Tensor:
    """Returns the mean over all ranks."""
    mean = tensor.clone()
    dist.all_reduce(mean)
    return mean / dist.get_world_size()


def assert_sums_close(actual: Tensor, expected: Tensor, summands: Iterable[Tensor]) -> None:
    """Checks sums or means of float32 entries: each rounds as its largest summand, not as itself.

    Entries of several ranks may cancel, and how much is left of their rounding depends on the
    processor.
    """
    largest = torch.stack([value.abs() for value in summands]).amax(0)
    beyond = (actual - expected).abs() > 2**-20 * largest
    assert not beyond.any(), (actual[beyond], expected[beyond], largest[beyond])


def relative_error(tensor: Tensor, exact: Tensor) -> float:
    """How far a tensor is from another, by the norm of that one."""
    return float((tensor - exact).norm() / exact.norm())


def everyone(value: Any, group: Any = None) -> list[Any]:
    """Returns the values of all ranks of a group."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def same(left: Any, right: Any) -> bool:
    """Returns whether two values are equal; of tensors, also inside, all numbers."""
    if isinstance(left, Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def sealed(state: dict[str, Any]) -> dict[str, Any]:
    """The saved state with checksums that are right for what it holds now."""
    for field, part in state.items():
        if field.startswith("rank"):
            part["checksum"] = checksum(state, part)
    return state


def equal_bits(tensors: list[Tensor]) -> bool:
    """Returns whether all tensors are equal, bit for bit."""
    return all(torch.equal(tensor, tensors[0]) for tensor in tensors)


def equal_on_all_ranks(*tensors: Tensor) -> bool:
    """Returns whether all ranks have the same finite numbers, bit for bit."""
    here = flat(tensors)
    everywhere = [torch.empty_like(here) for _ in range(dist.get_world_size())]
    dist.all_gather(everywhere, here)
    return equal_bits(everywhere) and bool(here.isfinite().all())


def through_file(value: Any, **options: Any) -> Any:
    """Returns what ``torch.load`` makes of a saved value."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, **options)


def outcome(call: Callable[..., Any], *args: Any, **options: Any) -> tuple[str, str] | None:
    """Name and text of the exception that a call raises; None if it raises none."""
    try:
        call(*args, **options)
    except Exception as error:  # the test looks at its type
        return type(error).__name__, str(error)
    return None


def row_of(average: Tensor, mean: Tensor) -> tuple[float, float, float]:
    """Error, cosine and norm of an average, beside the mean that it should be."""
    product = torch.dot(average.reshape(-1), mean.reshape(-1))
    cosine = float(product / (average.norm() * mean.norm()))
    return float((average - mean).norm() / mean.norm()), cosine, float(mean.norm())
