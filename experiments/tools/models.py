"""Defines models that load a reducer differently: convolutions, attention, tiny layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.tools.tasks import CharTransformer, TinyLayers

__all__ = ["MODELS", "Model"]


class Model(NamedTuple):
    """Describes a model of a study.

    Attributes:
        build: makes the model.
        make_input: makes an input with a number of rows.
        batch: number of rows at which communication is a usual part of a step.
    """

    build: Callable[[], nn.Module]
    make_input: Callable[[int], Tensor]
    batch: int


class _Residual(nn.Module):
    def __init__(self, c_in: int, c_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(c_in, c_out, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(c_out, c_out, 3, 1, 1, bias=False)
        # No running statistics: DDP would broadcast these buffers in every step.
        self.norm1 = nn.BatchNorm2d(c_out, track_running_stats=False)
        self.norm2 = nn.BatchNorm2d(c_out, track_running_stats=False)
        same = stride == 1 and c_in == c_out
        self.skip = nn.Identity() if same else nn.Conv2d(c_in, c_out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(y + self.skip(x))


def resnet() -> nn.Module:
    """Returns the layers of ResNet-18 for 32x32 images: 11 M parameters."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.ReLU()]
    width = 64
    for c_out, stride in ((64, 1), (64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2)):
        layers.append(_Residual(width, c_out, stride))
        width = c_out
    layers += [_Residual(512, 512, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10)]
    return nn.Sequential(*layers)


MODELS: dict[str, Model] = {
    "resnet": Model(resnet, lambda batch: torch.randn(batch, 3, 32, 32), 12),
    "transformer": Model(  # 13 M parameters, tied embedding
        lambda: CharTransformer(96, width=512, depth=4),
        lambda batch: torch.randint(0, 128, (batch, 96)),
        3,
    ),
    "words": Model(  # 14 M parameters, 3 M of which are one tied embedding
        lambda: CharTransformer(96, width=384, depth=6, vocabulary=8192),
        lambda batch: torch.randint(0, 8192, (batch, 96)),
        3,
    ),
    "tiny layers": Model(TinyLayers, lambda batch: torch.randn(batch, 64), 64),
}
