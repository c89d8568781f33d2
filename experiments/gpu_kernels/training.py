"""Times a step of GPT-2 blocks with each hook, and compiles a model whose step is watched.

One rank, in a group of NCCL: hooks encode and decode as they do among several ranks, and nothing
travels. Steps with a hook, with torch's hook of the same name and with the plain all-reduce take
turns.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_powersgd
from torch.nn.parallel import DistributedDataParallel

import commhooks
import ddp_core
from experiments.gpu_kernels import timing
from experiments.gpu_kernels.table import Setting, Step

__all__ = ["COLUMNS", "steps"]

COLUMNS = ("milliseconds", "over none", "over torch's hook")
# The scheme, its options, and torch's hook of the same name, if there is one.
HOOKS: dict[str, tuple[str, dict[str, Any], str]] = {
    "fp16": ("fp16", {}, "fp16_compress_hook"),
    "bf16": ("bf16", {}, "bf16_compress_hook"),
    "PowerSGD 4": ("powersgd", {"rank": 4}, "powerSGD_hook"),
    "int8": ("int8", {}, ""),
    "int4, feedback": ("int4", {"error_feedback": True}, ""),
    "top-k 1 %": ("topk", {"ratio": 0.01}, ""),
}
COMPILED = "torch.compile(mode='reduce-overhead') while a step is watched"
_SECONDS = 5.0  # several turns of the watchdog


def steps(setting: Setting) -> Iterator[Step]:
    """Yields a step per hook, and the compiled model."""
    for name in HOOKS:
        yield Step(name, lambda name=name: _compare(name, setting))
    yield Step(COMPILED, lambda: _compiled(setting))


def _compare(name: str, setting: Setting) -> dict[str, Any]:
    scheme, options, of_torch = HOOKS[name]
    with _group(setting):
        models = {kind: _wrapped(setting) for kind in ("none", "ours", "torch's")}
        if of_torch:
            _register_torch_hook(models["torch's"], of_torch)
        else:
            del models["torch's"]
        commhooks.register(models["none"], "none")
        hook = commhooks.register(models["ours"], scheme, **options)
        calls = {kind: _step_of(model, setting) for kind, model in models.items()}
        took: dict[str, list[float]] = {kind: [] for kind in calls}
        for turn in range(setting.repeats + 3):  # buckets are laid out anew in the second step
            for kind, call in calls.items():
                milliseconds = timing.milliseconds([call], 1)
                if turn >= 3:
                    took[kind].append(milliseconds)
        hook.close()
    median = {kind: statistics.median(values) for kind, values in took.items()}
    row = {"milliseconds": median["ours"], "over none": median["ours"] / median["none"]}
    if of_torch:
        row["over torch's hook"] = median["ours"] / median["torch's"]
    return row


def _compiled(setting: Setting) -> dict[str, Any]:
    with _group(setting):
        model = ddp_core.DistributedDataParallel(_model(setting))
        hook = commhooks.register(model, "none")
        mode = {"mode": "reduce-overhead"} if setting.device == "cuda" else {"backend": "eager"}
        evaluated: Any = torch.compile(_model(setting), **mode)
        step, inputs = _step_of(model, setting), _inputs(setting)
        with torch.no_grad():  # compiles, which takes longer than all that follows
            evaluated(inputs)
        end, times = time.monotonic() + _SECONDS, []
        while time.monotonic() < end:
            times.append(timing.milliseconds([step], 1))
            with torch.no_grad():  # captures, while the step before is watched
                evaluated(inputs)
        hook.close()
    return {"milliseconds": statistics.median(times)}


@contextmanager
def _group(setting: Setting) -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder:
        backend = "nccl" if setting.device == "cuda" else "gloo"
        store = dist.FileStore(str(Path(folder, "store")), 1)
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def _is_small(setting: Setting) -> bool:
    return setting.device == "cpu"


def _model(setting: Setting) -> nn.Module:
    """Returns four blocks of GPT-2 (28 million parameters); two narrow ones in a rehearsal."""
    width, heads, blocks = (64, 2, 2) if _is_small(setting) else (768, 12, 4)
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    )
    stack = nn.TransformerEncoder(layer, blocks, enable_nested_tensor=False)
    return stack.to(setting.device)


def _wrapped(setting: Setting) -> DistributedDataParallel:
    return DistributedDataParallel(_model(setting))


def _inputs(setting: Setting) -> torch.Tensor:
    shape = (2, 8, 64) if _is_small(setting) else (8, 512, 768)
    return torch.randn(shape, device=setting.device)


def _step_of(model: nn.Module, setting: Setting) -> Callable[[], None]:
    optimizer, inputs = torch.optim.SGD(model.parameters(), lr=1e-3), _inputs(setting)

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    return step


def _register_torch_hook(model: DistributedDataParallel, name: str) -> None:
    if name == "powerSGD_hook":
        state = torch_powersgd.PowerSGDState(
            None, matrix_approximation_rank=4, start_powerSGD_iter=2
        )
        model.register_comm_hook(state, torch_powersgd.powerSGD_hook)  # type: ignore[arg-type]
    else:
        model.register_comm_hook(None, getattr(default_hooks, name))
