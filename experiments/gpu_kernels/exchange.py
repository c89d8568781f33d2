"""Times one rank's exchange of a bucket: launches, host time and GPU time.

The bucket has the 12 parameters of a GPT-2 block (27 MiB of float32). Collectives are answered at
once by the same device; what these answers take is subtracted, so that the work of a scheme among
that many ranks is left. The host's time is that of buckets one after the other. Torch's hooks run
in a group of one rank of NCCL, on the same bucket.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_powersgd

from commhooks.core._layout import Layout
from commhooks.hook._engine import Engine
from commhooks.wrappers._make import make
from ddp_core import Collective, Streams, Task
from experiments.gpu_kernels import timing
from experiments.gpu_kernels.table import Setting, Step
from experiments.tools.fake_gpu import counts_of
from tests.device.loopback import loopback

__all__ = ["COLUMNS", "steps"]

COLUMNS = ("hook", "ranks", "own kernels", "operations of torch", "collectives")
COLUMNS += ("host microseconds", "GPU microseconds")
WIDTH = 768
SHAPES = [
    *((3 * WIDTH, WIDTH), (3 * WIDTH,), (WIDTH, WIDTH), (WIDTH,), (4 * WIDTH, WIDTH)),
    *((4 * WIDTH,), (WIDTH, 4 * WIDTH), (WIDTH,), (WIDTH,), (WIDTH,), (WIDTH,), (WIDTH,)),
]
RANKS = (8, 64)
SCHEMES: dict[str, tuple[str, dict[str, Any]]] = {
    "none": ("none", {}),
    "fp16": ("fp16", {}),
    "int8": ("int8", {}),
    "int4, feedback": ("int4", {"error_feedback": True}),
    "onebit": ("onebit", {}),
    "powersgd 4": ("powersgd", {"rank": 4}),
    "topk 1 %": ("topk", {"ratio": 0.01}),
    "sdp4bit": ("sdp4bit", {"local_size": 8}),
    "eden": ("eden", {}),
    "dgc": ("dgc", {}),
    "demo": ("demo", {}),
    "random_k": ("random_k", {}),
    "acpsgd": ("acpsgd", {}),
    "signsgd": ("signsgd", {}),
}
# Gloo's thread may hold a group for a moment longer; if it were the last to let it go, it would
# wait for itself.
_ENDED: list[Any] = []
_BUSY = 40_000_000  # clock cycles, 20 ms: longer than any exchange takes the host
_CALLS = 10  # buckets one after the other


class Bucket:
    """Provides the methods of DDP's bucket that torch's hooks call."""

    def __init__(self, gradient: Tensor) -> None:
        self.gradient = gradient
        sizes = [torch.Size(shape).numel() for shape in SHAPES]
        parts = zip(gradient.split(sizes), SHAPES, strict=True)
        self.views = [part.view(shape) for part, shape in parts]

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return False  # torch's hook counts steps at the last bucket, and logs

    def buffer(self) -> Tensor:
        return self.gradient

    def gradients(self) -> list[Tensor]:
        return self.views


def steps(setting: Setting) -> Iterator[Step]:
    """Yields a step per scheme and number of ranks, and per hook of torch."""
    for ranks in RANKS:
        for name in SCHEMES:
            yield Step(f"{name}, {ranks} ranks", lambda n=name, r=ranks: _scheme(n, r, setting))
    for name in ("torch, all-reduce", "torch, fp16", "torch, PowerSGD 4"):
        yield Step(name, lambda name=name: _torch(name, setting))


def _gradient(setting: Setting) -> Tensor:
    entries = sum(torch.Size(shape).numel() for shape in SHAPES)
    return torch.randn(entries, device=setting.device)


def _scheme(name: str, ranks: int, setting: Setting) -> dict[str, Any]:
    scheme_name, options = SCHEMES[name]
    scheme = make(scheme_name, **options)
    layout = Layout([f"p{i}" for i in range(len(SHAPES))], SHAPES)
    engine = Engine(scheme, rank=0, world_size=ranks)
    gradient = _gradient(setting)
    source = gradient.clone()
    streams = Streams(None)  # type: ignore[arg-type]  # the loopback asks no group

    def exchange() -> None:
        gradient.copy_(source)
        engine.begin_bucket(object(), is_last=True)
        task = Task(
            engine.exchange(gradient, layout),
            step=engine.step,
            bucket=0,
            dense_bytes=gradient.nbytes,
            world_size=ranks,
            max_rounds=scheme.traits.rounds,
        )
        streams.run(task, gradient.device).wait()

    row: dict[str, Any] = {"hook": name, "ranks": ranks}
    # Answers take no time, unlike a network's; streams wait for one another as in a real exchange.
    module = torch.cuda if setting.device == "cuda" else None
    requests: list[Collective] = []
    with loopback(module, ranks) as link:
        for _ in range(3):  # tables and buffers of the first steps
            exchange()
        answer = link.issue

        def noted(request: Collective) -> Any:
            requests.append(request)
            return answer(request)

        with mock.patch.object(link, "issue", noted):
            exchange()
        row["collectives"] = len(requests)

        def rest() -> None:
            gradient.copy_(source)
            for request in requests:
                answer(request).wait()

        row |= _times(exchange, rest, setting)
    try:
        counts = counts_of(scheme, SHAPES, world_size=ranks)
    except Exception as error:  # the counts are of a pretended GPU, and no reason to lose the times
        return row | {"own kernels": type(error).__name__, "operations of torch": ""}
    kernel_count, others = counts.kernels.total(), counts.operations.total()
    return row | {"own kernels": kernel_count, "operations of torch": others}


def _times(call: Callable[[], Any], rest: Callable[[], Any], setting: Setting) -> dict[str, float]:
    """Returns the times of ``call`` without those of ``rest``, which is a part of it."""
    rest()
    host = [timing.host_microseconds(each, setting.repeats, _CALLS) for each in (call, rest)]
    device = [timing.behind_a_sleep(each, setting.repeats, _BUSY) for each in (call, rest)]
    return {
        "host microseconds": host[0] - host[1],
        "GPU microseconds": (device[0] - device[1]) * 1e3,
    }


def _torch(name: str, setting: Setting) -> dict[str, Any]:
    bucket = Bucket(_gradient(setting))
    source = bucket.gradient.clone()
    made = not dist.is_initialized()
    with tempfile.TemporaryDirectory() as folder:
        if made:
            backend = "nccl" if setting.device == "cuda" else "gloo"
            store = dist.FileStore(os.path.join(folder, "store"), 1)
            dist.init_process_group(backend, store=store, rank=0, world_size=1)
        try:
            hook = _torch_hook(name)

            def exchange() -> None:
                bucket.gradient.copy_(source)
                hook(bucket).wait()

            for _ in range(3):
                exchange()
            copied = lambda: bucket.gradient.copy_(source)  # noqa: E731
            return {"hook": name, "ranks": 1, **_times(exchange, copied, setting)}
        finally:
            if made:
                _ENDED.append(dist.group.WORLD)
                dist.destroy_process_group()


def _torch_hook(name: str) -> Callable[[Any], Any]:
    if name == "torch, all-reduce":
        return lambda bucket: default_hooks.allreduce_hook(None, bucket)  # type: ignore[arg-type]
    if name == "torch, fp16":
        return lambda bucket: default_hooks.fp16_compress_hook(None, bucket)  # type: ignore[arg-type]
    state = torch_powersgd.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
    state.iter = 2  # compresses from the first call
    return lambda bucket: torch_powersgd.powerSGD_hook(state, bucket)
