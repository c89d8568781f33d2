"""Trains a model on simulated ranks, and records its loss and the errors of its averages."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from commhooks.core._layout import Layout
from commhooks.research import Simulation
from commhooks.research._error_figures import ErrorFigures, error_figures
from experiments.quality.setups import Arm, Setup
from experiments.tools.tasks import Task

__all__ = ["Errors", "Trainer", "schedule", "trained"]

WARM_UP = 0.1  # share of the steps in which the learning rate rises
BETA = 0.999  # of Adam's second moment, as torch's AdamW has it
FEEDBACK = ("residual", "averaged_error")  # names of what feedback keeps
WATCHED = (0.25, 0.5, 0.75, 1.0)  # parts of a run after which the error of a step is measured


def schedule(step: int, steps: int) -> float:
    """Returns the share of the learning rate at a step: a linear rise, then a linear fall to 0."""
    return min((step + 1) / max(1, round(WARM_UP * steps)), 1.0) * (1 - step / steps)


class Trainer:
    """Trains a model on the ranks of a :class:`commhooks.research.Simulation`.

    Args:
        task: model and batches of each rank.
        arm: scheme and clipping.
        ranks: simulated ranks.
        seed: of the model and of random draws.
        steps: of the whole run, for the schedule.
        device: of model and gradients.
    """

    def __init__(
        self, task: Task, arm: Arm, *, ranks: int, seed: int, steps: int, device: str = "cpu"
    ) -> None:
        torch.manual_seed(seed)  # all arms start from the same parameters
        self.task, self.arm, self.ranks, self.seed, self.steps = task, arm, ranks, seed, steps
        self.device = device
        self.model = task.model().to(device)
        named = list(self.model.named_parameters())
        self.parameters = [parameter for _, parameter in named]
        self.optimizer = task.optimizer(self.model)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: schedule(step, steps)
        )
        self.shapes = {name: tuple(parameter.shape) for name, parameter in named}
        self.simulation = self.simulated()
        self.step_index = 0
        self.loss = math.nan

    def simulated(self) -> Simulation:
        """Returns ranks that have run no step yet."""
        entry = self.arm.entry
        return Simulation(
            entry.scheme,
            self.shapes,
            world_size=self.ranks,
            seed=self.seed,
            **entry.options_with(None),
        )

    def gradients(self) -> Tensor:
        """Returns the flat gradient of each rank for its batch of this step, as a row."""
        losses: list[Tensor] = []
        buffers, first = list(self.model.buffers()), []
        grads = torch.empty(self.ranks, sum(p.numel() for p in self.parameters), device=self.device)
        for rank in range(self.ranks):
            x, target = (part.to(self.device) for part in self.task.batch(rank, self.step_index))
            loss = self.task.loss(self.model(x), target)
            pieces = torch.autograd.grad(loss, self.parameters)
            torch.cat([piece.reshape(-1) for piece in pieces], out=grads[rank])
            losses.append(loss.detach())
            if rank == 0:
                # As in DistributedDataParallel, all ranks go on from the statistics of the first.
                first = [buffer.clone() for buffer in buffers]
        for buffer, value in zip(buffers, first, strict=True):
            buffer.copy_(value)
        self.loss = float(torch.stack(losses).mean())
        return grads

    def exchange(self, grads: Tensor) -> Tensor:
        """Returns the average that the scheme gives all ranks."""
        return self.simulation.step(grads.unbind())[0]

    def update(self, mean: Tensor) -> None:
        """Takes the optimizer's step with an average."""
        sizes = [parameter.numel() for parameter in self.parameters]
        for parameter, piece in zip(self.parameters, mean.split(sizes), strict=True):
            parameter.grad = piece.view_as(parameter)
        if self.arm.clip is not None:  # after the exchange, as in a usual training loop
            nn.utils.clip_grad_norm_(self.parameters, self.arm.clip)
        self.optimizer.step()
        self.schedule.step()
        self.step_index += 1

    def evaluate(self) -> tuple[float, float]:
        """Returns loss and accuracy on held-out data."""
        return self.task.evaluate(_Fed(self.model, self.device))


class _Fed(nn.Module):
    """Feeds a model on a device with data of the CPU."""

    def __init__(self, model: nn.Module, device: str) -> None:
        super().__init__()
        self.model, self.device = model, device

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.model(x.to(self.device))
        return output.cpu()


class Errors:
    """Compares the averages of a run with the exact ones.

    Two kinds of figures are kept, each in three norms (see ``ErrorFigures``). That of a step is the
    error of the scheme on the gradients alone, without what feedback adds of earlier ones. That of
    a sum compares what the optimizer got in all steps with what it should have got.

    Args:
        trainer: whose averages are compared.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._layout = Layout(list(trainer.shapes), list(trainer.shapes.values()))
        zeros = torch.zeros(3, self._layout.numel, device=trainer.device)
        self._exact, self._received, self._squares = zeros.unbind()
        self._added = 0
        self._steps: list[ErrorFigures] = []
        self._watched = {max(0, round(part * trainer.steps) - 1) for part in WATCHED}

    def add_gradients(self, grads: Tensor) -> None:
        """Adds the gradients of the ranks in a step, before they are exchanged."""
        exact = grads.mean(0)
        self._added += 1
        self._squares.mul_(BETA).addcmul_(exact, exact, value=1 - BETA)
        self._exact += exact
        if self._trainer.step_index in self._watched:
            self._steps.append(self._figures(self.without_feedback(grads), exact))

    def add_average(self, mean: Tensor) -> None:
        """Adds what the ranks got."""
        self._received += mean

    def _figures(self, mean: Tensor, exact: Tensor) -> ErrorFigures:
        moment = self._squares / (1 - BETA ** max(self._added, 1))
        return error_figures(mean, exact, self._layout, moment)

    def without_feedback(self, grads: Tensor) -> Tensor:
        """Returns the average of ranks that forget what they have not sent, and nothing else.

        Raises:
            RuntimeError: ranks get different averages.
        """
        ranks = self._trainer.simulated()
        for old, new in zip(self._trainer.simulation.engines, ranks.engines, strict=True):
            kept: dict[str, dict[str, Tensor]] = {}
            for key, name, value in old.memory.items():
                if key not in FEEDBACK:
                    kept.setdefault(key, {})[name] = value.clone()
            new.memory.load(kept)
            new.step = old.step
        means = ranks.step(grads.unbind())
        if not all(torch.equal(mean, means[0]) for mean in means):
            raise RuntimeError(f"the ranks of {self._trainer.arm.name!r} got different averages")
        return means[0]

    def columns(self) -> dict[str, float]:
        """Returns the figures by name; those of a step are means over the watched steps."""
        total = self._figures(self._received, self._exact)
        figures: dict[str, float] = {}
        for name in ("error", "worst", "adam"):
            values = [getattr(step, name) for step in self._steps]
            figures[f"step_{name}"] = sum(values) / len(values) if values else math.nan
            figures[f"sum_{name}"] = getattr(total, name)
        return figures


@lru_cache(maxsize=4)
def _task(make: Callable[..., Task], ranks: int, batch_size: int, seed: int) -> Task:
    """Makes a task once for all arms of a seed, which run one after the other."""
    return make(ranks, batch_size=batch_size, seed=seed)


def trained(setup: Setup, arm: Arm, number: int, *, device: str = "cpu") -> dict[str, Any]:
    """Trains one model, and returns the row of the run.

    Args:
        setup: the task.
        arm: scheme, ranks and clipping.
        number: of the run; with the first seed of the arm, it gives the seed.
        device: "cpu" or "cuda".
    """
    begin, cpu_begin = time.perf_counter(), time.process_time()
    ranks, seed = arm.ranks or setup.ranks, arm.first_seed + number
    task = _task(setup.task, ranks, setup.batch_size // ranks, seed)
    trainer = Trainer(task, arm, ranks=ranks, seed=seed, steps=setup.steps, device=device)
    errors = Errors(trainer)
    loss = accuracy = math.nan
    for _ in range(setup.steps):
        grads = trainer.gradients()
        if not math.isfinite(trainer.loss):
            break
        errors.add_gradients(grads)
        mean = trainer.exchange(grads)
        errors.add_average(mean)
        trainer.update(mean)
    else:
        loss, accuracy = trainer.evaluate()
    return {
        "task": setup.name,
        "arm": arm.name,
        "run": number,
        "seed": seed,
        "ranks": ranks,
        "steps": setup.steps,
        "loss": loss,
        "misses": 1 - accuracy,
        "last_loss": trainer.loss,
        **errors.columns(),
        "seconds": time.perf_counter() - begin,
        "cpu_seconds": time.process_time() - cpu_begin,
        "device": device,
    }
