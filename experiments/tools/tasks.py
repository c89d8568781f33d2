"""Defines the tasks of the studies: digits, and Python source for a transformer and an LSTM.

The data are real and on every machine: scikit-learn's digits, and the source of the standard
library.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = [
    "TASKS",
    "CharLstm",
    "CharTransformer",
    "Task",
    "TinyLayers",
    "characters",
    "digits",
    "loss_and_accuracy",
    "lstm",
    "tiny_layers",
]

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Task:
    """Describes a model, its data and its evaluation.

    Attributes:
        name: name of the task.
        model: makes the model; the caller seeds torch first.
        batch: returns the training batch of a rank at a step.
        evaluate: returns loss and accuracy on held-out data.
        lr: learning rate.
        adam: trains with AdamW; False: with SGD and momentum 0.9.
    """

    name: str
    model: Callable[[], nn.Module]
    batch: Callable[[int, int], Batch]
    evaluate: Callable[[nn.Module], tuple[float, float]]
    lr: float
    adam: bool = False

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Returns the mean cross entropy over all predictions."""
        return F.cross_entropy(output.flatten(0, -2), target.flatten())

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Returns the optimizer that the task is trained with."""
        if self.adam:
            return torch.optim.AdamW(model.parameters(), lr=self.lr)
        return torch.optim.SGD(model.parameters(), lr=self.lr, momentum=0.9)


class DigitsCnn(nn.Module):
    """Classifies 8x8 images by three convolutions and two linear layers; 0.6 M parameters."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for c_in, c_out in ((1, 32), (32, 64), (64, 128)):
            layers += [nn.Conv2d(c_in, c_out, 3, padding=1, bias=False), nn.BatchNorm2d(c_out)]
            layers += [nn.ReLU()]
        self.body = nn.Sequential(*layers, nn.AvgPool2d(2), nn.Flatten())
        self.head = nn.Sequential(nn.Linear(128 * 16, 256), nn.ReLU(), nn.Linear(256, 10))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(x))
        return logits


class TinyLayers(nn.Module):
    """Chains narrow layers with skip connections; 500 of 64 make 2 M parameters in 1000 tensors."""

    def __init__(self, depth: int = 500, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + 0.05 * torch.tanh(layer(x))
        return x


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class CharTransformer(nn.Module):
    """Predicts bytes by a causal transformer: 4 layers, 128 wide; 0.8 M parameters."""

    def __init__(
        self, length: int, width: int = 128, depth: int = 4, *, vocabulary: int = 128
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(_Block(width, 4) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.tokens(x) + self.positions.weight[: x.shape[1]]
        return self.norm(self.blocks(hidden)) @ self.tokens.weight.t()


class CharLstm(nn.Module):
    """Predicts bytes by an LSTM of two layers, 128 wide; 0.26 M parameters.

    The four gates share a weight, and their gradients differ much in size.
    """

    def __init__(self, width: int = 128, *, vocabulary: int = 128) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width // 2)
        self.lstm = nn.LSTM(width // 2, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.tokens(x))
        logits: Tensor = self.head(hidden)
        return logits


def digits(world_size: int, *, batch_size: int = 16, seed: int = 0) -> Task:
    """Makes the task of scikit-learn's 1797 handwritten digits, of which a fifth is held out."""
    from sklearn.datasets import load_digits  # here: the other task does not need scikit-learn

    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(seed))
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1)[order] / 16
    labels = torch.tensor(data.target)[order]
    held_out = len(labels) // 5

    def batch(rank: int, step: int) -> Batch:
        # Each rank draws from its own share of the data, by step: a batch depends on nothing that
        # ran before, so that every scheme sees the same ones.
        share = torch.arange(held_out + rank, len(labels), world_size)
        generator = torch.Generator().manual_seed((seed * 1_000_003 + step) * 64 + rank)
        picked = share[torch.randint(len(share), (batch_size,), generator=generator)]
        return images[picked], labels[picked]

    def evaluate(model: nn.Module) -> tuple[float, float]:
        model.eval()
        with torch.no_grad():
            logits = model(images[:held_out])
        model.train()
        return loss_and_accuracy(logits, labels[:held_out])

    return Task("digits", DigitsCnn, batch, evaluate, lr=0.02)


def tiny_layers(world_size: int, *, batch_size: int = 16, seed: int = 0) -> Task:
    """Makes the task of the same digits for :class:`TinyLayers`, whose inputs are the pixels."""

    def model() -> nn.Module:
        return nn.Sequential(nn.Flatten(), TinyLayers(), nn.Linear(64, 10))

    return replace(
        digits(world_size, batch_size=batch_size, seed=seed), name="tiny layers", model=model
    )


def characters(
    world_size: int,
    *,
    batch_size: int = 4,
    length: int = 64,
    seed: int = 0,
    width: int = 128,
    depth: int = 4,
    windows: int = 64,
    packages: bool = False,
) -> Task:
    """Makes the task of the next byte of the standard library's source; holds out a tenth.

    Args:
        world_size: ranks, each with its own part of the text.
        batch_size: windows of a rank.
        length: characters of a window.
        seed: of the batches.
        width, depth: of the transformer.
        windows: number of held-out windows.
        packages: takes 40 MB of the source of installed packages, which machines have in different
            versions.
    """
    # The held-out part is contiguous: windows of training text may not overlap it.
    text = _source("purelib", 40_000_000) if packages else _source("stdlib", 2_000_000)
    held_out, train = text[: len(text) // 10], text[len(text) // 10 :]

    def cut(source: Tensor, starts: Tensor) -> Batch:
        rows = torch.stack([source[start : start + length + 1] for start in starts.tolist()])
        return rows[:, :-1], rows[:, 1:]

    def batch(rank: int, step: int) -> Batch:
        generator = torch.Generator().manual_seed((seed * 1_000_003 + step) * 64 + rank)
        # Each rank draws from its own part of the text, as in ``digits``.
        share = (len(train) - length - 1) // world_size
        starts = rank * share + torch.randint(share, (batch_size,), generator=generator)
        return cut(train, starts)

    def evaluate(model: nn.Module) -> tuple[float, float]:
        # The same windows in every evaluation, so that losses can be compared.
        starts = torch.linspace(0, len(held_out) - length - 2, windows).long()
        x, target = cut(held_out, starts)
        model.eval()
        with torch.no_grad():
            logits = model(x)
        model.train()
        return loss_and_accuracy(logits, target)

    model = partial(CharTransformer, length, width, depth)
    return Task("characters", model, batch, evaluate, lr=2e-3, adam=True)


def lstm(
    world_size: int, *, batch_size: int = 4, length: int = 64, seed: int = 0, windows: int = 64
) -> Task:
    """Makes the task of the same text for :class:`CharLstm`."""
    task = characters(world_size, batch_size=batch_size, length=length, seed=seed, windows=windows)
    return replace(task, name="lstm", model=CharLstm)


def loss_and_accuracy(logits: Tensor, target: Tensor) -> tuple[float, float]:
    """Returns the mean cross entropy and the share of right predictions."""
    loss = F.cross_entropy(logits.flatten(0, -2), target.flatten())
    accuracy = (logits.argmax(-1) == target).float().mean()
    return float(loss), float(accuracy)


def _source(place: str, limit: int) -> Tensor:
    """Returns the ASCII bytes of the modules of a folder of Python, in the order of their names."""
    pattern = "*.py" if place == "stdlib" else "**/*.py"
    pieces, total = [], 0
    for path in sorted(Path(sysconfig.get_path(place)).glob(pattern)):
        piece = bytes(byte for byte in path.read_bytes() if byte < 128)
        pieces.append(piece)
        total += len(piece)
        if total >= limit:
            break
    return torch.frombuffer(bytearray(b"".join(pieces)[:limit]), dtype=torch.uint8).long()


TASKS: dict[str, Callable[..., Task]] = {
    "digits": digits,
    "characters": characters,
    "lstm": lstm,
    "tiny layers": tiny_layers,
}
