"""Shows how Adam moves rows of an embedding that no batch has.

Run ``python -m experiments.dead_rows``. The LSTM of the other studies has an embedding of 1024 rows
here, of which its text uses about 100, in random places; all others have a gradient of exactly
zero. Ranks are simulated. ``moved`` is how far the rows without a gradient are from where they
began after training, over how far the used rows are (root mean squares): 0 where a scheme keeps
zeros. Where it does not, Adam divides what little noise a row gets by its own size.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import Progress
from torch import Tensor, nn

from commhooks.research import Simulation
from experiments.tools.tables import printed
from experiments.tools.tasks import CharLstm, Task, lstm

# The width is no power of two. Where a rotated block has one used row of 64 and three others, its
# four parts are equal but for signs, are rounded alike, and cancel in the other rows.
ROWS, WIDTH = 1024, 75
SCHEMES: dict[str, tuple[str, dict[str, Any]]] = {
    "none": ("none", {}),
    "int8": ("int8", {}),
    "fp8": ("fp8", {}),
    "int4 without rotation": ("int4", {"rotate": False}),
    "topk 1 %": ("topk", {"ratio": 0.01}),
    "powersgd 4": ("powersgd", {"rank": 4}),
    "int4": ("int4", {}),
    "eden 4": ("eden", {"bits": 4}),
    "eden 2": ("eden", {"bits": 2}),
    "onebit": ("onebit", {}),
    "onebit, rotated": ("onebit", {"rotate": True, "block": 256}),
}


def with_dead_rows(task: Task) -> Task:
    """Returns the task with bytes at random places of an embedding of ``ROWS``."""
    places = torch.randperm(ROWS, generator=torch.Generator().manual_seed(0))[:128]

    def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
        x, target = task.batch(rank, step)
        return places[x], places[target]

    def evaluate(model: nn.Module) -> tuple[float, float]:
        # The task's own evaluation, of a model that sees places and is asked for bytes.
        return task.evaluate(_OfBytes(model, places))

    model = partial(CharLstm, 2 * WIDTH, vocabulary=ROWS)
    return replace(task, model=model, batch=batch, evaluate=evaluate)


class _OfBytes(nn.Module):
    def __init__(self, model: nn.Module, places: Tensor) -> None:
        super().__init__()
        self.model, self.places = model, places

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model(self.places[x])
        return logits.log_softmax(-1)[..., self.places]


def train(
    task: Task, scheme: str, options: dict[str, Any], ranks: int, steps: int
) -> Iterator[Any]:
    """Trains with a scheme; yields None after each step, and the figures at last."""
    torch.manual_seed(0)
    model: Any = task.model()
    begin = copy.deepcopy(model.tokens.weight.detach())
    parameters = dict(model.named_parameters())
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    simulation = Simulation(scheme, shapes, world_size=ranks, seed=1, **options)
    optimizer = task.optimizer(model)
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.0  # which moves rows, too
    used = torch.zeros(ROWS, dtype=torch.bool)
    for step in range(steps):
        gradients = []
        for rank in range(ranks):
            x, target = task.batch(rank, step)
            used[x.unique()] = True
            loss = task.loss(model(x), target)
            by_parameter = torch.autograd.grad(loss, list(parameters.values()))
            gradients.append(torch.cat([gradient.reshape(-1) for gradient in by_parameter]))
        mean = simulation.step(gradients)[0]
        sizes = [parameter.numel() for parameter in parameters.values()]
        for parameter, part in zip(parameters.values(), mean.split(sizes), strict=True):
            parameter.grad = part.view_as(parameter).clone()
        optimizer.step()
        yield None
    moved = (model.tokens.weight.detach() - begin).square().mean(1)
    dead, live = moved[~used].mean().sqrt(), moved[used].mean().sqrt()
    yield {
        "moved": float(dead / live),
        "rows that moved": float((moved[~used] > 0).float().mean()),
        "loss": task.evaluate(model)[0],
    }


def main(
    steps: Annotated[int, typer.Option(min=1, help="Steps of training.")] = 300,
    ranks: Annotated[int, typer.Option(min=2, help="Simulated ranks.")] = 4,
    out: Annotated[Path, typer.Option(help="The table, as CSV.")] = Path("results/dead_rows.csv"),
) -> None:
    """Trains with each scheme, and prints and writes the table."""
    task, rows = with_dead_rows(lstm(ranks)), []
    with Progress() as progress:
        for label, (scheme, options) in SCHEMES.items():
            bar = progress.add_task(label, total=steps)
            for figures in train(task, scheme, options, ranks, steps):
                if figures is None:
                    progress.advance(bar)
                else:
                    rows.append({"scheme": label, **figures})
    printed(rows, out, digits=4)


if __name__ == "__main__":
    typer.run(main)
