"""``python -m experiments.hook_cost``: step time of our hooks over torch's, in alternating runs.

Three models: a ResNet-18 for 32x32 images (11 M parameters), a transformer (14 M), 500 tiny layers
(2 M). A ratio is of two blocks, one after the other; quartiles are over such pairs. PowerSGD is
compared in one bucket and from step 2 on, where torch's hook runs on Gloo.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
import torch.distributed as dist
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_powersgd
from torch.nn.parallel import DistributedDataParallel

import commhooks
from experiments.processes import run_ranks
from experiments.tasks import CharTransformer

TABLE_WIDTH = 110
Pair = tuple[str, float, Callable[[Any], Any], Callable[[Any], Any]]


class _Residual(nn.Module):
    def __init__(self, c_in: int, c_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(c_in, c_out, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(c_out, c_out, 3, 1, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(c_out, track_running_stats=False)
        self.norm2 = nn.BatchNorm2d(c_out, track_running_stats=False)
        same = stride == 1 and c_in == c_out
        self.skip = nn.Identity() if same else nn.Conv2d(c_in, c_out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(y + self.skip(x))


def resnet() -> nn.Module:
    """ResNet-18's layers for 32x32 images."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.ReLU()]
    width = 64
    for c_out, stride in ((64, 1), (64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2)):
        layers.append(_Residual(width, c_out, stride))
        width = c_out
    layers += [_Residual(512, 512, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10)]
    return nn.Sequential(*layers)


class _Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(500))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + 0.05 * torch.tanh(layer(x))
        return x


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "resnet": (resnet, lambda: torch.randn(12, 3, 32, 32)),
    "transformer": (
        lambda: CharTransformer(96, width=512, depth=4),
        lambda: torch.randint(0, 128, (3, 96)),
    ),
    "tiny layers": (_Tiny, lambda: torch.randn(64, 64)),
}


def _torch_powersgd(ddp: DistributedDataParallel) -> None:
    state = torch_powersgd.PowerSGDState(None, 4, start_powerSGD_iter=2)
    ddp.register_comm_hook(state, torch_powersgd.powerSGD_hook)


# Name, bucket size in MB, torch's, ours.
PAIRS: list[Pair] = [
    (
        "allreduce",
        25,
        lambda ddp: ddp.register_comm_hook(None, default_hooks.allreduce_hook),
        lambda ddp: commhooks.register(ddp, "none"),
    ),
    (
        "fp16",
        25,
        lambda ddp: ddp.register_comm_hook(None, default_hooks.fp16_compress_hook),
        lambda ddp: commhooks.register(ddp, "fp16"),
    ),
    (
        "PowerSGD 4, one bucket",
        4096,
        _torch_powersgd,
        lambda ddp: commhooks.register(ddp, "powersgd", rank=4, start_step=2),
    ),
]


def compare(
    rank: int,
    world_size: int,
    send: Callable[[Any], None],
    model: str,
    rounds: int,
    block: int,
) -> None:
    """One process: blocks of steps with torch's and our hook in turn, for every pair."""
    make_model, make_input = MODELS[model]
    for name, cap, torchs, ours in PAIRS:
        runners = []
        for attach in (torchs, ours):
            torch.manual_seed(0)
            ddp = DistributedDataParallel(make_model(), bucket_cap_mb=cap)
            runners.append((ddp, attach(ddp)))
        torch.manual_seed(rank)
        x = make_input()
        for ddp, _ in runners:
            _steps(ddp, x, 4)
        ratios, backwards = [], []
        for turn in range(rounds):
            times = {}
            order = (0, 1) if turn % 2 == 0 else (1, 0)
            for which in order:
                times[which] = _steps(runners[which][0], x, block)
            ratios.append(times[1][0] / times[0][0])
            backwards.append(times[1][1] / times[0][1])
        if rank == 0:
            low, middle, high = statistics.quantiles(ratios, n=4)
            row = {"model": model, "hook": name, "step_ratio": middle, "q1": low, "q3": high}
            send({**row, "backward_ratio": statistics.median(backwards), "rounds": rounds})
        for _, hook in runners:
            if hook is not None:
                hook.close()


def _steps(ddp: DistributedDataParallel, x: Tensor, count: int) -> tuple[float, float]:
    """Seconds of ``count`` steps (forward, backward, update) and of their backward passes.

    Of the slowest rank.
    """
    dist.barrier()
    begin, backward = time.perf_counter(), 0.0
    for _ in range(count):
        for parameter in ddp.parameters():
            parameter.grad = None
        loss = ddp(x).float().square().mean()
        middle = time.perf_counter()
        loss.backward()
        backward += time.perf_counter() - middle
        with torch.no_grad():
            gradients = [p.grad for p in ddp.parameters()]
            torch._foreach_add_(list(ddp.parameters()), gradients, alpha=-1e-4)
    seconds = torch.tensor([time.perf_counter() - begin, backward])
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds[0]), float(seconds[1])


def main(
    model: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(MODELS)}.")] = None,
    rounds: Annotated[int, typer.Option(help="Alternating pairs.", min=5)] = 15,
    block: Annotated[int, typer.Option(help="Steps of a turn.", min=1)] = 4,
    out: Annotated[Path, typer.Option(help="Where the table goes.")] = Path(
        "results/hook_cost.csv"
    ),
) -> None:
    """Prints the ratios; below 1 ours is faster."""
    console, rows = Console(), []
    if console.width < TABLE_WIDTH:  # a pipe, or a narrow terminal: wrapped lines read better
        console = Console(width=TABLE_WIDTH)
    names = model or list(MODELS)
    for name in names:
        if name not in MODELS:
            raise typer.BadParameter(f"{name!r} is not one of {', '.join(MODELS)}")
    with Progress(console=console) as progress:
        bar = progress.add_task("measuring", total=len(names) * len(PAIRS))
        for name in names:
            for row in run_ranks(compare, 2, name, rounds, block):
                rows.append(row)
                progress.update(bar, advance=1, description=f"{name}: {row['hook']}")
    table = pd.DataFrame(rows)
    console.print(table.to_string(index=False, float_format="{:.3f}".format))
    out.parent.mkdir(parents=True, exist_ok=True)
    table.to_csv(out, index=False)
    console.print(f"wrote {out}")


if __name__ == "__main__":
    typer.run(main)
