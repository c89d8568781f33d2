"""Trains a model on simulated ranks, and records its loss and the errors of its averages."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from commhooks.research import Simulation
from commhooks.research._error_figures import ErrorFigures, SecondMoment, error_figures
from experiments.quality.setups import Arm, Setup
from experiments.tools.tasks import Task

__all__ = ["Trainer", "schedule", "trained"]

WARM_UP = 0.1  # share of the steps in which the learning rate rises
TAIL, EVALUATIONS = 0.2, 5  # share of the steps at the end with evaluations, and how many
WATCHED = (0.1, 0.4, 0.7, 1.0)  # parts of a run after which the error of a step is measured


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
        self.parameters = list(self.model.parameters())
        self.optimizer = task.optimizer(self.model)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: schedule(step, steps)
        )
        self.shapes = {name: tuple(p.shape) for name, p in self.model.named_parameters()}
        self.simulation = Simulation(
            arm.entry.scheme,
            self.shapes,
            world_size=ranks,
            seed=seed,
            **arm.entry.options_with(None),
        )
        self.step_index = 0
        self.loss = math.nan

    def gradients(self) -> list[Tensor]:
        """Returns the flat gradient of each rank for its batch of this step."""
        grads, losses = [], []
        buffers = list(self.model.buffers())
        first = []
        for rank in range(self.ranks):
            x, target = (part.to(self.device) for part in self.task.batch(rank, self.step_index))
            loss = self.task.loss(self.model(x), target)
            pieces = torch.autograd.grad(loss, self.parameters)
            grads.append(torch.cat([piece.reshape(-1) for piece in pieces]))
            losses.append(loss.detach())
            if rank == 0:
                # As in DistributedDataParallel, all ranks go on from the statistics of the first.
                first = [buffer.clone() for buffer in buffers]
        for buffer, value in zip(buffers, first, strict=True):
            buffer.copy_(value)
        self.loss = float(torch.stack(losses).mean())
        return grads

    def exchange(self, grads: Sequence[Tensor]) -> Tensor:
        """Returns the average that the scheme gives all ranks."""
        return self.simulation.step(grads)[0]

    def update(self, mean: Tensor) -> None:
        """Takes the optimizer's step with an average."""
        sizes = [parameter.numel() for parameter in self.parameters]
        for parameter, piece in zip(self.parameters, mean.split(sizes), strict=True):
            parameter.grad = piece.view_as(parameter)
        if self.arm.clip is not None:
            nn.utils.clip_grad_norm_(self.parameters, self.arm.clip)
        self.optimizer.step()
        self.schedule.step()
        self.step_index += 1
