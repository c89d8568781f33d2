"""Small models with the traits that trouble a reducer."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Breaks(torch.autograd.Function):
    """The identity; raises in backward, if asked to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, breaks: bool) -> Tensor:
        ctx.breaks = breaks
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if ctx.breaks:
            raise ArithmeticError("on purpose")
        return grad, None


class Cnn(nn.Module):
    """Convolutions with batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 16, 3),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(),
        )
        self.head = nn.Linear(32 * 16, 150)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).flatten(1))


class TiedTransformer(nn.Module):
    """A language model whose embedding is its output layer."""

    def __init__(self, vocabulary: int = 40, width: int = 32) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(width, vocabulary, bias=False)
        self.out.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layers(self.tokens(x)))


class Branches(nn.Module):
    """Uses one of three branches, two of them share a layer; one parameter is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(16, 16)
        self.branches = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.never = nn.Parameter(torch.randn(5))
        self.out = nn.Linear(16, 16)

    def forward(self, x: Tensor, choice: int) -> Tensor:
        if choice < 2:
            x = self.shared(x)
        return self.out(self.shared(self.branches[choice](x)) if choice else self.branches[0](x))


class SometimesUnused(nn.Module):
    """Two outputs, of which the loss may use one."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(16, 16), nn.Linear(16, 16)
        self.idle = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.left(x), self.right(x)


class Embedded(nn.Module):
    """A sparse embedding and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16, sparse=True)
        self.out = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.embedding(x))


class ManyTypes(nn.Module):
    """Complex, double, half and single precision; a scalar; a transposed (dense) weight."""

    def __init__(self) -> None:
        super().__init__()
        self.wave = nn.Parameter(torch.randn(16, 16, dtype=torch.complex64))
        self.wide = nn.Parameter(torch.randn(16, dtype=torch.float64))
        self.narrow = nn.Parameter(torch.randn(16, dtype=torch.bfloat16))
        self.scalar = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.randn(0))
        self.turned = nn.Parameter(torch.randn(8, 16).t())
        self.out = nn.Linear(16, 300)

    def forward(self, x: Tensor) -> Tensor:
        y = (x.to(torch.complex64) @ self.wave).abs() * self.wide.float() + self.narrow.float()
        return self.out(y * self.scalar + (y @ self.turned) @ self.turned.t() + self.empty.sum())


class Checkpointed(nn.Module):
    """One layer used twice, under activation checkpointing; one parameter unused."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.first, self.twice = nn.Linear(16, 16), nn.Linear(16, 16)
        self.idle = nn.Linear(16, 16)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.first(x))
        for _ in range(2):
            y = checkpoint(self.twice, y, use_reentrant=self.reentrant)
        return y


def frozen_part() -> nn.Module:
    """The middle layer is not trained."""
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Linear(64, 16))
    for parameter in model[2].parameters():
        parameter.requires_grad_(False)
    return model


def loss_of(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    """A scalar of all outputs."""
    outputs = output if isinstance(output, tuple) else (output,)
    return torch.stack([F.softplus(each.float()).mean() for each in outputs]).sum()
