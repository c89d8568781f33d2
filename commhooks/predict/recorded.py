"""Records when the gradients of a model come, as a workload for predictions."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from commhooks.predict.workload import Layer, Workload

__all__ = ["Recorder", "record"]


class Recorder:
    """Records the times of steps of a model: begin, each parameter's gradient, begin of the next.

    With several backward passes per step, the last one counts. On a GPU the host's times are those
    at which work was enqueued; in a steady state both advance alike.

    Args:
        model: the model, in DistributedDataParallel or not.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names = [name for name, one in model.named_parameters() if one.requires_grad]
        parameters = [one for one in model.parameters() if one.requires_grad]
        self._shapes = [tuple(one.shape) for one in parameters]
        self._steps: list[tuple[float, dict[int, float]]] = []
        self._handles: list[Any] = [
            one.register_post_accumulate_grad_hook(partial(self._came, index))
            for index, one in enumerate(parameters)
        ]

    def _came(self, index: int, parameter: torch.Tensor) -> None:
        if self._steps:
            self._steps[-1][1][index] = time.perf_counter()

    def step_begins(self) -> None:
        """Marks the begin of a step; the step before has ended."""
        self._steps.append((time.perf_counter(), {}))

    def close(self) -> None:
        """Stops recording."""
        for handle in self._handles:
            handle.remove()

    def workload(self, name: str) -> Workload:
        """Returns the workload of a step: medians over the recorded steps but the last.

        Raises:
            ValueError: fewer than two steps were recorded, or none had a gradient.
        """
        ended = [
            (begin, arrivals, after[0] - begin)
            for (begin, arrivals), after in zip(self._steps, self._steps[1:], strict=False)
            if arrivals
        ]
        if not ended:
            raise ValueError(
                "Recorder.workload: record two steps or more, with gradients; "
                f"{len(self._steps)} were begun"
            )
        used = [index for index in range(len(self._names)) if index in ended[-1][1]]
        arrivals = {
            index: statistics.median(
                came[index] - begin for begin, came, _ in ended if index in came
            )
            for index in used
        }
        first, last = min(arrivals.values()), max(arrivals.values())
        whole = statistics.median(seconds for _, _, seconds in ended)
        return Workload(
            name,
            tuple(Layer(self._names[index], self._shapes[index], 0.0) for index in used),
            forward_s=first,
            backward_s=last - first,
            optimizer_s=max(whole - last, 0.0),
            ready_s=tuple(arrivals[index] - first for index in used),
        )


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
