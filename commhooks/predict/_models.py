"""Describes well-known models by the shapes and operations of their layers.

Layers come from the hyper-parameters that the papers give, in the order of definition. Operations
are those of matrix products and convolutions; those that have no parameter (attention scores, a
tied output layer) count with the parameter before them, whose gradient comes after theirs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from commhooks._torch import tree_map
from commhooks.core._settings import shown
from commhooks.predict._device import Device
from commhooks.predict._exchange_plan import PredictionError
from commhooks.predict._workload import Layer, Workload

__all__ = ["BATCHES", "MODELS", "Model", "model", "model_of"]


@dataclass(frozen=True)
class Model:
    """Describes a model independently of a device.

    Attributes:
        name: shown in tables.
        layers: parameters in the order of definition, with their operations.
        sample: describes a sample.
        batch: default number of samples of a rank's step.
        share: of the operations per second that :class:`Device` states, which are those of large
            transformers.
        source: where the number of parameters is published.
    """

    name: str
    layers: tuple[Layer, ...]
    sample: str
    batch: int
    share: float = 1.0
    source: str = ""

    @property
    def numel(self) -> int:
        """Returns the number of parameters."""
        return sum(layer.numel for layer in self.layers)

    @property
    def flops(self) -> float:
        """Returns the floating-point operations of the forward pass of a sample."""
        return sum(layer.flops for layer in self.layers)

    def workload(self, device: Device, *, batch: int | None = None) -> Workload:
        """Returns a step on a device: forward, backward, and an optimizer with two moments.

        Args:
            device: its ``flops`` and ``bandwidth`` count.
            batch: samples of a rank's step.

        Raises:
            ValueError: the batch is not positive, or the device's speed is unknown.

        Example:
            >>> model("resnet50").workload(DEVICES["a100"], batch=64).compute_s
        """
        samples = self.batch if batch is None else batch
        if samples < 1:
            raise ValueError(f"Model.workload(batch=...) is 1 or more, got {samples}")
        if not device.flops > 0:
            raise ValueError(
                f"Model.workload({device.name}): its operations per second are not known; record "
                f"steps with commhooks.predict.record"
            )
        forward_s = samples * self.flops / (device.flops * self.share)
        # Adam reads gradient, parameter and two moments, and writes the last three: 4 bytes each.
        optimizer_s = 7 * 4 * self.numel / device.bandwidth
        return replace(
            Workload.of(self.name, self.layers, forward_s=forward_s), optimizer_s=optimizer_s
        )


class _Layers(list[Layer]):
    """Collects layers; ``tokens`` and ``side`` give how often a layer is applied to a sample."""

    def add(self, name: str, *shape: int, flops: float = 0.0) -> None:
        self.append(Layer(name, shape, flops))

    def norm(self, name: str, width: int, *, bias: bool = True) -> None:
        self.add(f"{name}.weight", width)
        if bias:
            self.add(f"{name}.bias", width)

    def conv(self, name: str, c_in: int, c_out: int, kernel: int, side: int) -> None:
        """Adds a convolution; ``side`` is its output's."""
        shape = (c_out, c_in, kernel, kernel)
        self.add(f"{name}.weight", *shape, flops=2 * c_out * c_in * kernel**2 * side**2)

    def linear(
        self, name: str, c_in: int, c_out: int, tokens: int = 1, *, bias: bool = True
    ) -> None:
        self.add(f"{name}.weight", c_out, c_in, flops=2 * c_in * c_out * tokens)
        if bias:
            self.add(f"{name}.bias", c_out)

    def also(self, flops: float) -> None:
        """Adds operations without parameters."""
        self[-1] = replace(self[-1], flops=self[-1].flops + flops)

    def attend(self, tokens: int, width: int) -> None:
        """Adds attention: two products of tokens x width x tokens."""
        self.also(4 * tokens**2 * width)


# ---- convolutions


def _resnet(blocks: tuple[int, ...], *, bottleneck: bool) -> _Layers:
    layers = _Layers()
    layers.conv("conv1", 3, 64, 7, 112)
    layers.norm("bn1", 64)
    c_in, side = 64, 56
    for stage, count in enumerate(blocks):
        width, c_out = 64 * 2**stage, 64 * 2**stage * (4 if bottleneck else 1)
        for block in range(count):
            name, before = f"layer{stage + 1}.{block}", side
            side //= 2 if stage and not block else 1
            if bottleneck:  # torchvision's: the 3 x 3 convolution has the stride
                convs = [(c_in, width, 1, before), (width, width, 3, side), (width, c_out, 1, side)]
            else:
                convs = [(c_in, width, 3, side), (width, width, 3, side)]
            for number, conv in enumerate(convs, start=1):
                layers.conv(f"{name}.conv{number}", *conv)
                layers.norm(f"{name}.bn{number}", conv[1])
            if c_in != c_out:
                layers.conv(f"{name}.downsample.0", c_in, c_out, 1, side)
                layers.norm(f"{name}.downsample.1", c_out)
            c_in = c_out
    layers.linear("fc", c_in, 1000)
    return layers


def _vgg16() -> _Layers:
    layers = _Layers()
    c_in, side = 3, 224
    for stage, (width, count) in enumerate(((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))):
        for number in range(count):
            name = f"features.{stage}.{number}"
            layers.conv(name, c_in, width, 3, side)
            layers.add(f"{name}.bias", width)
            c_in = width
        side //= 2
    for number, (wide, narrow) in enumerate(((512 * 7 * 7, 4096), (4096, 4096), (4096, 1000))):
        layers.linear(f"classifier.{number}", wide, narrow)
    return layers


# ---- language models


def _lstm(words: int, width: int, depth: int, tokens: int) -> _Layers:
    layers = _Layers()
    layers.add("encoder.weight", words, width)  # tied to the output layer
    for level in range(depth):
        for part in ("ih", "hh"):
            shape = (4 * width, width)
            layers.add(f"rnn.weight_{part}_l{level}", *shape, flops=8 * width**2 * tokens)
        for part in ("ih", "hh"):
            layers.add(f"rnn.bias_{part}_l{level}", 4 * width)
    layers.add("decoder.bias", words, flops=2 * words * width * tokens)
    return layers


def _bert(depth: int, width: int, tokens: int) -> _Layers:
    layers = _Layers()
    for name, rows in (("word", 30522), ("position", 512), ("token_type", 2)):
        layers.add(f"embeddings.{name}_embeddings.weight", rows, width)
    layers.norm("embeddings.LayerNorm", width)
    for level in range(depth):
        name = f"encoder.layer.{level}"
        for part in ("query", "key", "value"):
            layers.linear(f"{name}.attention.self.{part}", width, width, tokens)
        layers.attend(tokens, width)
        layers.linear(f"{name}.attention.output.dense", width, width, tokens)
        layers.norm(f"{name}.attention.output.LayerNorm", width)
        layers.linear(f"{name}.intermediate.dense", width, 4 * width, tokens)
        layers.linear(f"{name}.output.dense", 4 * width, width, tokens)
        layers.norm(f"{name}.output.LayerNorm", width)
    layers.linear("pooler.dense", width, width)
    return layers


def _gpt2(depth: int, width: int, *, words: int = 50257, tokens: int = 1024) -> _Layers:
    layers = _Layers()

    def product(name: str, c_in: int, c_out: int) -> None:  # its weight is (inputs, outputs)
        layers.add(f"{name}.weight", c_in, c_out, flops=2 * c_in * c_out * tokens)
        layers.add(f"{name}.bias", c_out)

    layers.add("wte.weight", words, width)  # tied to the output layer
    layers.add("wpe.weight", 1024, width)
    for level in range(depth):
        layers.norm(f"h.{level}.ln_1", width)
        product(f"h.{level}.attn.c_attn", width, 3 * width)
        layers.attend(tokens, width)
        product(f"h.{level}.attn.c_proj", width, width)
        layers.norm(f"h.{level}.ln_2", width)
        product(f"h.{level}.mlp.c_fc", width, 4 * width)
        product(f"h.{level}.mlp.c_proj", 4 * width, width)
    layers.norm("ln_f", width)
    layers.also(2 * words * width * tokens)
    return layers


def _llama(
    depth: int, width: int, inner: int, words: int, *, key_width: int, tied: bool, tokens: int
) -> _Layers:
    layers = _Layers()

    def product(name: str, c_in: int, c_out: int) -> None:
        layers.linear(name, c_in, c_out, tokens, bias=False)

    layers.add("embed_tokens.weight", words, width)
    for level in range(depth):
        name = f"layers.{level}"
        product(f"{name}.self_attn.q_proj", width, width)
        product(f"{name}.self_attn.k_proj", width, key_width)
        product(f"{name}.self_attn.v_proj", width, key_width)
        layers.attend(tokens, width)
        product(f"{name}.self_attn.o_proj", width, width)
        product(f"{name}.mlp.gate_proj", width, inner)
        product(f"{name}.mlp.up_proj", width, inner)
        product(f"{name}.mlp.down_proj", inner, width)
        layers.norm(f"{name}.input_layernorm", width, bias=False)
        layers.norm(f"{name}.post_attention_layernorm", width, bias=False)
    layers.norm("norm", width, bias=False)
    if tied:
        layers.also(2 * words * width * tokens)
    else:
        product("lm_head", width, words)
    return layers


# ---- by name

# NVIDIA's DeepLearningExamples (ResNet50 v1.5 for PyTorch, 21.03) train 2470 images per second on
# an A100 in mixed precision: 19 % of the dense rate, where Device takes 40 % for transformers. On
# a V100 they train 1200, 24 %, so that steps are predicted too long there, by a third.
_CONV = 0.5
# A product per token of a few hundred rows: cuDNN's recurrent layers stay far below. Assumed.
_RECURRENT = 0.25
_IMAGE = "224 x 224 pixels"
_VISION = "pytorch.org/vision, num_params of the weights"

_MAKERS: dict[str, tuple[Callable[[], _Layers], str, int, float, str]] = {
    "resnet18": (lambda: _resnet((2, 2, 2, 2), bottleneck=False), _IMAGE, 128, _CONV, _VISION),
    "resnet50": (lambda: _resnet((3, 4, 6, 3), bottleneck=True), _IMAGE, 64, _CONV, _VISION),
    "vgg16": (_vgg16, _IMAGE, 32, _CONV, _VISION),
    "lstm": (
        lambda: _lstm(28869, 650, 3, tokens=30),
        "30 words of WikiText-2",
        64,
        _RECURRENT,
        "Vogels et al., PowerSGD, 2019: shapes of appendix F, 7730 MB in 70 steps",
    ),
    "bert-base": (
        lambda: _bert(12, 768, tokens=128),
        "128 tokens",
        32,
        1.0,
        "bert-base-uncased with pooler: 109,482,240",
    ),
    "bert-large": (
        lambda: _bert(24, 1024, tokens=512),
        "512 tokens",
        8,
        1.0,
        "bert-large-uncased with pooler: 335,141,888",
    ),
    "gpt2": (lambda: _gpt2(12, 768), "1024 tokens", 8, 1.0, "openai-community/gpt2: 124,439,808"),
    "gpt2-xl": (
        lambda: _gpt2(48, 1600),
        "1024 tokens",
        4,
        1.0,
        "openai-community/gpt2-xl: 1,557,611,200",
    ),
    "llama-1b": (
        lambda: _llama(16, 2048, 8192, 128256, key_width=512, tied=True, tokens=4096),
        "4096 tokens",
        2,
        1.0,
        "meta-llama/Llama-3.2-1B: 1,235,814,400 (1.23 B)",
    ),
    "llama-8b": (
        lambda: _llama(32, 4096, 14336, 128256, key_width=1024, tied=False, tokens=4096),
        "4096 tokens",
        1,
        1.0,
        "meta-llama/Llama-3.1-8B: 8,030,261,248",
    ),
    "diloco-30m": (
        lambda: _llama(6, 256, 768, 50257, key_width=256, tied=False, tokens=512),
        "512 tokens",
        4,
        1.0,
        "github.com/Adnan082/diloco-measured: torchtitan's debugmodel with 50,257 words",
    ),
}

MODELS = tuple(_MAKERS)
BATCHES = {name: batch for name, (_, _, batch, _, _) in _MAKERS.items()}  # without --batch


@cache
def model(name: str) -> Model:
    """Returns a built-in model by name.

    Raises:
        ValueError: there is no such model; the message lists the built-in ones.

    Example:
        >>> model("gpt2").numel
        124439808
    """
    if name not in _MAKERS:
        raise ValueError(f"model({shown(name)}): models are {', '.join(_MAKERS)}")
    make_layers, sample, batch, share, source = _MAKERS[name]
    return Model(name, tuple(make_layers()), sample, batch, share, source)


# ---- models of the user


def model_of(module: nn.Module, *inputs: Any, name: str = "") -> Model:
    """Returns a model with the parameters of a module, and the operations that use them.

    The forward pass runs on tensors without data (PyTorch's "meta" device), so that a model of any
    size takes no memory beside its parameters. Operations without a parameter count with the
    parameter that was used before them. Parameters come in the order of their use; those that are
    never used by a module of their own come first, since it is unknown when they are ready.

    Args:
        module: the model. Only parameters that require gradients count.
        inputs: of its forward pass; samples are counted along the first dimension of the first
            tensor.
        name: shown in tables; the class of the model by default.

    Raises:
        PredictionError: the model reads values of its activations, so that it does not run without
            data; record steps of it instead.

    Example:
        >>> model_of(nn.Linear(1000, 10), torch.empty(64, 1000)).flops
        20000.0
    """
    batch = next((len(value) for value in inputs if isinstance(value, Tensor) and value.ndim), 1)
    shown = name or type(module).__name__
    with torch.device("meta"):
        empty = _on_meta(module)
    order = _Order(empty)
    try:
        with torch.no_grad(), order:
            empty(*(tree_map(_moved, value) for value in inputs))
    except (NotImplementedError, RuntimeError) as error:
        raise PredictionError(
            f"model_of({shown}): its forward pass does not run on tensors without data; record "
            f"steps with commhooks.predict.record instead: {error}"
        ) from error
    finally:
        order.close()
    shapes = {
        key: tuple(parameter.shape)
        for key, parameter in empty.named_parameters()
        if parameter.requires_grad
    }
    used = [key for key in order.flops if key in shapes]
    unused = [key for key in shapes if key not in order.flops]
    layers = [Layer(key, shapes[key], order.flops.get(key, 0) / batch) for key in (*unused, *used)]
    return Model(shown, tuple(layers), sample="1 row of the example", batch=batch)


def _on_meta(module: nn.Module) -> nn.Module:
    """Returns a copy of a module without data, without copying the data meanwhile."""
    memo: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        empty: Tensor = torch.empty_like(tensor, device="meta")
        if isinstance(tensor, nn.Parameter):
            empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
        memo[id(tensor)] = empty
    return copy.deepcopy(module, memo)


def _moved(value: Any) -> Any:
    return value.to("meta") if isinstance(value, Tensor) else value


class _Order:
    """Attributes operations to the parameter of the module that began last."""

    def __init__(self, module: nn.Module) -> None:
        self.flops: dict[str, float] = {}
        self._counter = FlopCounterMode(display=False)
        self._names = {id(parameter): key for key, parameter in module.named_parameters()}
        self._latest, self._before = "", 0.0
        self._handles = [
            submodule.register_forward_pre_hook(self._begins)
            for submodule in module.modules()
            if any(True for _ in submodule.parameters(recurse=False))
        ]

    def __enter__(self) -> None:
        self._counter.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._settle()
        self._counter.__exit__(*error)

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _begins(self, module: nn.Module, inputs: Any) -> None:
        self._settle()
        names = [self._names[id(parameter)] for parameter in module.parameters(recurse=False)]
        # A weight that is tied to an earlier layer waits for that one, too: what uses it again
        # counts with the parameter before.
        new = [name for name in names if name not in self.flops]
        self.flops.update(dict.fromkeys(new, 0.0))
        if new:
            self._latest = new[0]

    def _settle(self) -> None:
        total = float(self._counter.get_total_flops())
        if self._latest:
            self.flops[self._latest] += total - self._before
        self._before = total
