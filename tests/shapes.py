"""Parameter shapes of well-known models, without the models."""

from __future__ import annotations

from collections.abc import Sequence

Shape = tuple[int, ...]


def _conv(out: int, inp: int, size: int = 3) -> list[Shape]:
    """A convolution without bias and its batch norm."""
    return [(out, inp, size, size), (out,), (out,)]


def _linear(out: int, inp: int) -> list[Shape]:
    return [(out, inp), (out,)]


def resnet18_cifar(classes: int = 10) -> list[Shape]:
    shapes = _conv(64, 3)
    last = 64
    for stage, width in enumerate((64, 128, 256, 512)):
        for block in range(2):
            shapes += _conv(width, last) + _conv(width, width)
            if stage and not block:
                shapes += _conv(width, last, 1)
            last = width
    return shapes + _linear(classes, 512)


def resnet_bottleneck(blocks: Sequence[int], classes: int = 1000) -> list[Shape]:
    shapes = _conv(64, 3, 7)
    last = 64
    for width, count in zip((64, 128, 256, 512), blocks, strict=True):
        for block in range(count):
            shapes += _conv(width, last, 1) + _conv(width, width) + _conv(4 * width, width, 1)
            if not block:
                shapes += _conv(4 * width, last, 1)
            last = 4 * width
    return shapes + _linear(classes, 2048)


def vgg(per_stage: Sequence[int], *, classes: int = 1000, cifar: bool = False) -> list[Shape]:
    """With batch norm and one linear layer for CIFAR, without and with three for ImageNet."""
    shapes: list[Shape] = []
    last = 3
    for width, count in zip((64, 128, 256, 512, 512), per_stage, strict=True):
        for _ in range(count):
            shapes += [(width, last, 3, 3), (width,)] + [(width,), (width,)] * cifar
            last = width
    if cifar:
        return shapes + _linear(classes, 512)
    return shapes + _linear(4096, 25088) + _linear(4096, 4096) + _linear(classes, 4096)


def lstm(tokens: int = 28869, width: int = 650, layers: int = 3) -> list[Shape]:
    """Encoder and decoder share one matrix."""
    layer = [(4 * width, width), (4 * width, width), (4 * width,), (4 * width,)]
    return [(tokens, width), *layer * layers, (tokens,)]


def bert(layers: int, width: int, tokens: int = 30522, positions: int = 512) -> list[Shape]:
    norm: list[Shape] = [(width,), (width,)]
    layer = _linear(width, width) * 4 + norm
    layer += _linear(4 * width, width) + _linear(width, 4 * width) + norm
    embedding = [(tokens, width), (positions, width), (2, width), *norm]
    return embedding + layer * layers + _linear(width, width)


def gpt2(layers: int, width: int, tokens: int = 50257, positions: int = 1024) -> list[Shape]:
    """Weights of linear layers are stored (in, out)."""
    norm: list[Shape] = [(width,), (width,)]
    layer = [*norm, (width, 3 * width), (3 * width,), (width, width), (width,)]
    layer += [*norm, (width, 4 * width), (4 * width,), (4 * width, width), (width,)]
    return [(tokens, width), (positions, width), *layer * layers, *norm]


def llama(layers: int, width: int, hidden: int, shared_heads: int, *, tied: bool) -> list[Shape]:
    tokens, heads = 128256, 32
    keys = shared_heads * width // heads
    layer: list[Shape] = [(width, width), (keys, width), (keys, width), (width, width)]
    layer += [(hidden, width), (hidden, width), (width, hidden), (width,), (width,)]
    head: list[Shape] = [] if tied else [(tokens, width)]
    return [(tokens, width), *layer * layers, (width,), *head]


MODELS: dict[str, list[Shape]] = {
    "ResNet-18 (CIFAR-10)": resnet18_cifar(),
    "ResNet-50": resnet_bottleneck((3, 4, 6, 3)),
    "ResNet-101": resnet_bottleneck((3, 4, 23, 3)),
    "VGG-16": vgg((2, 2, 3, 3, 3)),
    "VGG-19": vgg((2, 2, 4, 4, 4)),
    "VGG-16-BN (CIFAR-10)": vgg((2, 2, 3, 3, 3), classes=10, cifar=True),
    "LSTM 3x650": lstm(),
    "BERT-base": bert(12, 768),
    "BERT-large": bert(24, 1024),
    "GPT-2": gpt2(12, 768),
    "GPT-2 medium": gpt2(24, 1024),
    "GPT-2 XL": gpt2(48, 1600),
    "Llama-3.2-1B": llama(16, 2048, 8192, 8, tied=True),
    "Llama-3-8B": llama(32, 4096, 14336, 8, tied=False),
}
