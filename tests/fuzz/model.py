"""The model of a case: three layers, and whatever troubles a reducer."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.fuzz.case import Case

__all__ = ["BRANCH_USES", "MODEL_FEATURES", "Boom", "Gate", "Net", "batch", "used"]

WIDTH = 16
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f64": torch.float64}

# What a name in ``Case.model`` adds; those that more is to be said of are told below.
MODEL_FEATURES = {
    "branches": "two layers that are used or not, see BRANCH_USES; the last parameters",
    "front": "the same, but the first parameters: their gradients come last",
    "never": "a parameter that is never used",
    "tied": "two layers share a weight",
    "frozen": "a layer that is not trained",
    "bf16": "a layer in bfloat16",
    "f16": "a layer in float16",
    "f64": "a layer in float64",
    "all_bf16": "everything in bfloat16",
    "all_f64": "everything in float64",
    "conv": "a convolution in channels-last",
    "turned": "a transposed weight",
    "empty": "a parameter without entries",
    "scalar": "a parameter without dimensions",
    "norm": "vectors only",
    "large": "a weight that is copied as it arrives",
    "sparse": "an embedding with sparse gradients",
    "complex": "a complex parameter",
    "checkpoint": "a layer under activation checkpointing",
    "reentrant": "the same, the reentrant kind",
    "twice": "a layer under checkpointing that is used twice",
    "buffer": "a buffer that every rank changes in its own way",
    "recompute": "activation checkpointing around the DistributedDataParallel",
    "extra": "a layer that events freeze",
}

# Which of the branches are used.
BRANCH_USES = {
    "all": "both, always",
    "alternate": "one, the other in the next step",
    "ranks": "one, the other in the next step and on the next rank",
    "once": "both in the first step, then none",
    "late": "none in the first step, then both",
    "random": "drawn for each step and rank",
    "same": "drawn for each step",
    "none": "none, ever",
}


def used(case: Case, step: int, micro: int, rank: int) -> set[int]:
    """The branches that a forward pass uses."""
    draw = random.Random(f"{case.seed}/{step}/{micro}/{rank if case.use == 'random' else 0}")
    drawn = {branch for branch in (0, 1) if draw.random() < 0.5}
    return {
        "all": {0, 1},
        "alternate": {step % 2},
        "ranks": {(step + rank) % 2},
        "once": set() if step else {0, 1},
        "late": {0, 1} if step else set(),
        "random": drawn,
        "same": drawn,
        "none": set(),
    }[case.use]


def batch(case: Case, step: int, micro: int, rank: int) -> Tensor:
    """Rows that belong to this pass and rank."""
    key = ((case.seed * 101 + step) * 11 + micro) * 7 + rank + 1
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(key))


class Boom(ValueError):
    """Raised by a backward pass of a case."""


class Gate(torch.autograd.Function):
    """Lets a gradient pass; or raises, or makes an entry of it infinite or NaN."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, action: str | None) -> Tensor:
        ctx.action = action
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad = grads[0]
        if ctx.action == "raise":
            raise Boom("boom")
        if ctx.action in ("inf", "nan"):
            grad = grad.clone()
            grad.view(-1)[0] = float(ctx.action)
        return grad, None


class Scaled(torch.autograd.Function):
    """A parameter as it is, whose gradient is so many times as large."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.scale, None


class Line(nn.Linear):
    """A linear layer whose parameters' gradients have scales of their own."""

    scales = (1.0, 1.0)

    def forward(self, inputs: Tensor) -> Tensor:
        weight, bias = (
            value if value is None or scale == 1.0 else Scaled.apply(value, scale)
            for value, scale in zip((self.weight, self.bias), self.scales, strict=True)
        )
        return F.linear(inputs, weight, bias)


class Net(nn.Module):
    """``first``, ``middle`` and ``out``, with what the case asks for."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        torch.manual_seed(case.seed)
        self.wants = wants = set(case.model)
        if "front" in wants:
            self.branches = _layers(2)
        self.first = Line(8, WIDTH)
        self.middle = Line(WIDTH, WIDTH)
        self.parts = nn.ModuleDict(
            {name: self._part(name) for name in sorted(wants) if name in _LAYERS}
        )
        if "frozen" in wants:
            self.parts["frozen"].requires_grad_(False)
        if "tied" in wants:
            self.parts["tied"].weight = self.middle.weight
        if "never" in wants:
            self.never = nn.Parameter(torch.randn(5))
        if "empty" in wants:
            self.empty = nn.Parameter(torch.randn(0, 3))
        if "scalar" in wants:
            self.scalar = nn.Parameter(torch.tensor(0.9))
        if "turned" in wants:
            self.turned = nn.Parameter((torch.randn(8, WIDTH) / 4).t())
        if "complex" in wants:
            self.wave = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64) / 4)
        if "buffer" in wants:
            self.register_buffer("state", torch.zeros(3))
        self.seen: list[Tensor] = []  # the buffer, forward by forward
        self.replay: list[Tensor] = []  # what to take instead of the buffer
        self.out = Line(WIDTH, 6)
        if "branches" in wants:
            self.branches = _layers(2)
        for name, layer in self.named_modules():
            if case.scaled and isinstance(layer, Line):
                draw = random.Random(f"{case.seed}/{name}")
                layer.scales = (10 ** draw.uniform(-6, 3), 10 ** draw.uniform(-6, 3))
        for name in ("bf16", "f64"):
            if f"all_{name}" in wants:
                self.to(DTYPES[name])

    def _part(self, name: str) -> nn.Module:
        layer = _LAYERS[name]()
        return layer.to(DTYPES.get(name, torch.float32))

    def forward(self, inputs: Tensor, use: set[int], gates: dict[str, str], rank: int) -> Tensor:
        """
        Args:
            use: branches.
            gates: what happens in backward at the gates "first", "middle" and "last".
            rank: changes the buffer in its own way.
        """
        kind = self.first.weight.dtype
        seen = self._see(rank)
        y = torch.tanh(self.first(Gate.apply(inputs.to(kind), gates.get("last"))))
        if gates.get("forward"):
            raise Boom("boom")
        y = Gate.apply(y, gates.get("middle"))
        y = y + torch.tanh(self.middle(y))
        for name, layer in self.parts.items():
            y = y + _apply(name, layer, y)
        if "turned" in self.wants:
            y = y + y @ self.turned @ self.turned.t()
        if "complex" in self.wants:
            y = y + torch.view_as_real(y.to(self.wave.dtype) @ self.wave).sum(-1).to(y.dtype)
        if "empty" in self.wants:
            y = y + self.empty.sum()
        if "scalar" in self.wants:
            y = y * self.scalar
        if seen is not None:
            y = y * (1 + seen.sum().to(y.dtype))
        for index in sorted(use) if {"front", "branches"} & self.wants else ():
            y = y + torch.tanh(self.branches[index](y))
        return Gate.apply(self.out(y), gates.get("first"))

    def _see(self, rank: int) -> Tensor | None:
        """The buffer as this pass finds it; changed for the next one."""
        if "buffer" not in self.wants:
            return None
        if self.replay:
            return self.replay.pop(0)
        self.seen.append(self.state.clone())
        self.state += (rank + 1) * 0.25
        return self.seen[-1]


def _layers(number: int) -> nn.ModuleList:
    return nn.ModuleList(Line(WIDTH, WIDTH) for _ in range(number))


def _line() -> nn.Module:
    return Line(WIDTH, WIDTH)


_LAYERS: dict[str, Any] = {
    **dict.fromkeys(
        ("tied", "frozen", "bf16", "f16", "f64", "checkpoint", "reentrant", "twice", "extra"), _line
    ),
    "conv": lambda: nn.Conv2d(4, 4, 3, padding=1).to(memory_format=torch.channels_last),
    "norm": lambda: nn.LayerNorm(WIDTH),
    "large": lambda: Line(WIDTH, 1100, bias=False),
    "sparse": lambda: nn.Embedding(20, WIDTH, sparse=True),
}


def _apply(name: str, layer: nn.Module, y: Tensor) -> Tensor:
    kind = next(layer.parameters()).dtype
    z = y.to(kind)
    if name == "conv":
        z = layer(z.view(-1, 4, 2, 2)).flatten(1)
    elif name == "sparse":
        z = layer((y.detach()[:, 0].float().abs() * 10).long() % 20)
    elif name == "large":
        z = layer(z)[:, :WIDTH]
    elif name in ("checkpoint", "reentrant", "twice"):
        for _ in range(2 if name == "twice" else 1):
            z = checkpoint(layer, z, use_reentrant=name == "reentrant")
    else:
        z = layer(z)
    return torch.tanh(z.to(y.dtype))
