"""Records when the gradients of a model come, as a workload for predictions."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from commhooks.core.names import plain_names
from commhooks.predict.workload import Layer, Workload

__all__ = ["Recorder", "record"]


@dataclass
class _Times:
    began: float
    came: dict[int, float] = field(default_factory=dict)
    waited_s: float = 0.0


class Recorder:
    """Records the times of steps of a model: begin, each parameter's gradient, begin of the next.

    With several backward passes per step, the last one counts. On a GPU the host's times are those
    at which work was enqueued; in a steady state both advance alike.

    Args:
        model: the model, in DistributedDataParallel or not.
    """

    def __init__(self, model: nn.Module) -> None:
        plain = plain_names(name for name, _ in model.named_parameters())
        self._names = [plain[name] for name, one in model.named_parameters() if one.requires_grad]
        self._parameters = [one for one in model.parameters() if one.requires_grad]
        self._shapes = [tuple(one.shape) for one in self._parameters]
        self._steps: list[_Times] = []
        self._handles: list[Any] = [
            one.register_post_accumulate_grad_hook(partial(self._came, index))
            for index, one in enumerate(self._parameters)
        ]

    def _came(self, index: int, parameter: torch.Tensor) -> None:
        if self._steps:
            self._steps[-1].came[index] = time.perf_counter()

    def step_begins(self, waited_s: float = 0.0) -> None:
        """Marks the begin of a step.

        Args:
            waited_s: seconds of the step before in which it waited for communication.
        """
        if self._steps:
            self._steps[-1].waited_s = waited_s
        self._steps.append(_Times(time.perf_counter()))

    def close(self) -> None:
        """Stops recording."""
        for handle in self._handles:
            handle.remove()

    def workload(self, name: str, group: dist.ProcessGroup | None = None) -> Workload:
        """Returns the workload of a step, from the recorded steps but the last.

        Args:
            name: shown in tables.
            group: ranks that have recorded the same steps, which they began together; all call
                this method. None: what ranks wait for each other is not known.

        Raises:
            ValueError: fewer than two steps were recorded, or none had a gradient.
        """
        ended = [
            (one, after.began - one.began - one.waited_s)
            for one, after in zip(self._steps, self._steps[1:], strict=False)
            if one.came
        ]
        if not ended:
            raise ValueError(
                "Recorder.workload: record two steps or more, with gradients; "
                f"{len(self._steps)} were begun"
            )
        used = sorted(ended[-1][0].came)
        arrivals = {
            index: statistics.median(
                one.came[index] - one.began for one, _ in ended if index in one.came
            )
            for index in used
        }
        first, last = min(arrivals.values()), max(arrivals.values())
        seconds = [one for _, one in ended]
        whole = _usual(seconds)
        slowest = seconds if group is None else _slowest(seconds, group)
        return Workload(
            name,
            tuple(Layer(self._names[index], self._shapes[index], 0.0) for index in used),
            forward_s=first,
            backward_s=last - first,
            optimizer_s=max(whole - last, 0.0),
            ready_s=tuple(arrivals[index] - first for index in used),
            behind_s=max(_usual(slowest) - whole, 0.0),
        )


def _usual(seconds: Sequence[float]) -> float:
    """Returns the mean of all steps but those that took twice the median: a machine's hiccups."""
    middle = statistics.median(seconds)
    return statistics.fmean(one for one in seconds if one <= 2 * middle)


def _slowest(seconds: Sequence[float], group: dist.ProcessGroup) -> list[float]:
    """Returns the seconds of the slowest rank, step by step."""
    gathered: list[Any] = [None] * group.size()
    dist.all_gather_object(gathered, list(seconds), group=group)
    return [max(of_ranks) for of_ranks in zip(*gathered, strict=False)]


@contextmanager
def _recording(model: nn.Module) -> Iterator[Recorder]:
    recorder = Recorder(model)
    try:
        yield recorder
    finally:
        recorder.close()


def record(model: nn.Module, step: Callable[[], Any], *, steps: int = 5) -> Workload:
    """Runs some steps and returns the workload that they are.

    Steps with communication are no workload: take the model without DistributedDataParallel, or
    with the hook "noop".

    Args:
        model: the model.
        step: runs one step: forward, backward, optimizer.
        steps: number of steps of which the medians count; two more warm up.

    Example:
        >>> record(model, lambda: train_step(model, batch))
    """
    if steps < 1:
        raise ValueError(f"record(steps=...) is 1 or more, got {steps}")
    for _ in range(2):
        step()
    with _recording(model) as recorder:
        for _ in range(steps):
            recorder.step_begins()
            step()
        recorder.step_begins()
        return recorder.workload(type(model).__name__)
