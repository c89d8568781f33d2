"""Describes a training step without communication: parameters, and when gradients arrive."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn

from commhooks.core._names import plain_names
from commhooks.core._settings import check_settings, from_json, is_shape, printable, shown
from commhooks.predict._fabric import MAX_SECONDS
from ddp_core import on_device_of
from ddp_core.reducer._plan import assign_buckets

__all__ = ["Buckets", "Layer", "Recorder", "Workload", "load_workload", "record", "save_workload"]


MiB = 2**20
_MAX_FLOPS = 1e30  # of a parameter: far more than any takes


@dataclass(frozen=True)
class Layer:
    """Describes a parameter.

    Attributes:
        name: of the parameter.
        shape: of the parameter.
        flops: floating-point operations of the forward pass of one sample that use it. Backward
            takes twice as many.
    """

    name: str
    shape: tuple[int, ...]
    flops: float

    def __post_init__(self) -> None:
        check_settings(self)
        whole = isinstance(self.shape, tuple) and is_shape(self.shape)
        if not whole or not 0 <= self.flops <= _MAX_FLOPS:
            raise ValueError(
                f"Layer(shape, flops): a tuple of whole numbers, 0 or more each, of 2**48 entries "
                f"at most, and a number from 0 to {_MAX_FLOPS:.0g}, got {shown(self.shape)} and "
                f"{self.flops!r} for {shown(self.name)}"
            )

    @property
    def numel(self) -> int:
        """Returns the number of entries."""
        return torch.Size(self.shape).numel()


@dataclass(frozen=True)
class Buckets:
    """Describes the buckets of a step, in the order in which they are launched.

    Attributes:
        names, shapes: of the parameters of each bucket.
        ready: seconds from the begin of a step to the last gradient of each bucket.
    """

    names: tuple[tuple[str, ...], ...]
    shapes: tuple[tuple[torch.Size, ...], ...]
    ready: NDArray[np.float64]


@dataclass(frozen=True)
class Workload:
    """Describes a training step of one rank without communication.

    Attributes:
        name: shown in tables.
        layers: parameters in the order of the forward pass.
        forward_s, backward_s, optimizer_s: seconds of the parts of a step. With gradient
            accumulation ``forward_s`` is everything before the last backward pass.
        ready_s: seconds from the begin of the last backward pass to each parameter's gradient, in
            the order of ``layers``; by the layers' FLOPs if not given.
        per_bucket_overhead_s: seconds per bucket that ranks wait for the slowest one; every step
            with communication takes longer by that.

    Example:
        >>> Workload.of("mine", [Layer("w", (512, 512), 2 * 512**2)], forward_s=0.01)
    """

    name: str
    layers: tuple[Layer, ...]
    forward_s: float
    backward_s: float
    optimizer_s: float = 0.0
    ready_s: tuple[float, ...] | None = None
    per_bucket_overhead_s: float = 0.0

    def __post_init__(self) -> None:
        check_settings(self)
        object.__setattr__(self, "name", printable(self.name))  # a file's, shown on a terminal
        for name in ("forward_s", "backward_s", "optimizer_s", "per_bucket_overhead_s"):
            if not 0 <= getattr(self, name) <= MAX_SECONDS:
                raise ValueError(
                    f"Workload({name}=...): seconds, from 0 to {MAX_SECONDS:.0g}, got "
                    f"{getattr(self, name)!r}"
                )
        if self.ready_s is not None:
            times = np.array(self.ready_s)
            if times.shape != (len(self.layers),) or not (
                times.dtype.kind in "iuf" and ((times >= 0) & (times <= MAX_SECONDS)).all()
            ):
                raise ValueError(
                    f"Workload(ready_s=...): seconds from 0 to {MAX_SECONDS:.0g}, one for each of "
                    f"{len(self.layers)} layers, got {shown(self.ready_s)}"
                )

    @classmethod
    def of(cls, name: str, layers: Iterable[Layer], *, forward_s: float) -> Workload:
        """Returns a workload whose backward pass takes twice as long as its forward pass."""
        return cls(name, tuple(layers), forward_s, 2 * forward_s)

    @classmethod
    def of_module(cls, module: nn.Module, *, forward_s: float, name: str = "") -> Workload:
        """Returns the workload of a model, with times in proportion to its parameters.

        Args:
            module: the model; its parameters are taken to be used in the order of registration.
            forward_s: seconds of a forward pass.
            name: shown in tables; the class of the model by default.
        """
        layers = [
            Layer(key, tuple(parameter.shape), 2.0 * parameter.numel())
            for key, parameter in module.named_parameters()
            if parameter.requires_grad
        ]
        return cls.of(name or type(module).__name__, layers, forward_s=forward_s)

    @property
    def numel(self) -> int:
        """Returns the number of entries of all parameters."""
        return sum(layer.numel for layer in self.layers)

    @property
    def compute_s(self) -> float:
        """Returns the seconds of a step without communication."""
        return self.forward_s + self.backward_s + self.optimizer_s

    @cached_property
    def arrivals(self) -> NDArray[np.float64]:
        """Returns the seconds from the begin of the step to each parameter's gradient."""
        if self.ready_s is not None:
            return self.forward_s + np.asarray(self.ready_s, dtype=np.float64)
        flops = np.array([layer.flops for layer in self.layers], dtype=np.float64)
        done = np.cumsum(flops[::-1])[::-1]  # backward begins with the last layer
        return self.forward_s + self.backward_s * done / max(done[0] if len(done) else 0.0, 1e-30)

    def buckets(
        self,
        *,
        cap_mb: float = 25.0,
        first_mb: float = 1.0,
        kind_of: Callable[[str, torch.Size], object] | None = None,
    ) -> Buckets:
        """Returns the buckets that DistributedDataParallel makes of the gradients.

        Args:
            cap_mb, first_mb: MiB at which a bucket, and the first one, are full.
            kind_of: returns the kind of a parameter, if a scheme needs buckets of one kind each.

        Raises:
            ValueError: ``cap_mb`` or ``first_mb`` is not a finite number above 0.
        """
        if not (0 < cap_mb < math.inf and 0 < first_mb < math.inf):
            raise ValueError(
                f"Workload.buckets(cap_mb, first_mb): MiB, finite and above 0, got {cap_mb!r} and "
                f"{first_mb!r}"
            )
        order = np.argsort(self.arrivals, kind="stable").tolist()
        # Gradients that come together come in reverse order, as backward computes them.
        order.sort(key=lambda index: (self.arrivals[index], -index))
        shapes = [torch.Size(layer.shape) for layer in self.layers]
        kinds = [
            None if kind_of is None else kind_of(layer.name, shape)
            for layer, shape in zip(self.layers, shapes, strict=True)
        ]
        indices = assign_buckets(
            [4 * layer.numel for layer in self.layers],
            kinds,
            (int(first_mb * MiB), int(cap_mb * MiB)),
            alone=[False] * len(self.layers),
            order=order,
        )
        ready = np.array([max(self.arrivals[index] for index in members) for members in indices])
        launch = np.argsort(ready, kind="stable")
        return Buckets(
            tuple(tuple(self.layers[index].name for index in indices[at]) for at in launch),
            tuple(tuple(shapes[index] for index in indices[at]) for at in launch),
            ready[launch],
        )

    def accumulated(self, passes: int) -> Workload:
        """Returns the workload of ``passes`` backward passes per exchange.

        Only the last pass overlaps with an exchange, so the exposed time does not change.

        Args:
            passes: forward and backward passes of a step, 1 or more.

        Raises:
            ValueError: there is no pass.
        """
        if passes < 1:
            raise ValueError(f"Workload.accumulated(passes) is 1 or more, got {passes}")
        before = (passes - 1) * (self.forward_s + self.backward_s)
        return replace(self, forward_s=self.forward_s + before)


def save_workload(workload: Workload, path: str | Path) -> None:
    """Writes a workload as JSON, for :func:`load_workload` and ``--timeline``."""
    Path(path).write_text(json.dumps(asdict(workload)) + "\n", encoding="utf-8")


def load_workload(path: str | Path) -> Workload:
    """Reads a workload that :func:`save_workload` wrote.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file holds no workload.
    """
    try:
        values: dict[str, Any] = from_json(Path(path).read_text(encoding="utf-8"))
        layers = tuple(
            Layer(layer["name"], tuple(layer["shape"]), layer["flops"])
            for layer in values.pop("layers")
        )
        ready_s = values.pop("ready_s", None)
        return Workload(
            layers=layers, ready_s=None if ready_s is None else tuple(ready_s), **values
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"load_workload({str(path)!r}): not a workload's file: {printable(str(error))}"
        ) from error


# ---- recorded steps


@dataclass
class _Times:
    began: float
    came: dict[int, float] = field(default_factory=dict)
    waited_s: float = 0.0


class Recorder:
    """Records the times of a model's steps: begin, each parameter's gradient, next begin.

    With several backward passes per step, the last one counts. On a GPU the host's times are those
    at which work was enqueued; in a steady state both advance alike.

    Args:
        model: the model, in DistributedDataParallel or not.
    """

    def __init__(self, model: nn.Module) -> None:
        plain = plain_names(name for name, _ in model.named_parameters())
        self._names = [
            plain[name] for name, parameter in model.named_parameters() if parameter.requires_grad
        ]
        self._parameters = [
            parameter for parameter in model.parameters() if parameter.requires_grad
        ]
        self._shapes = [tuple(parameter.shape) for parameter in self._parameters]
        self._steps: list[_Times] = []
        self._handles: list[Any] = [
            parameter.register_post_accumulate_grad_hook(partial(self._came, index))
            for index, parameter in enumerate(self._parameters)
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
        """Returns the workload of a step, from all recorded steps but the last.

        Args:
            name: shown in tables.
            group: ranks that have recorded the same steps, which they began together; all call
                this method. None: the time for which ranks wait for each other is unknown.

        Raises:
            ValueError: fewer than two steps were recorded, or none had a gradient.
        """
        ended = [
            (step, after.began - step.began - step.waited_s)
            for step, after in zip(self._steps, self._steps[1:], strict=False)
            if step.came
        ]
        if not ended:
            raise ValueError(
                "Recorder.workload: record two steps or more, with gradients; "
                f"{len(self._steps)} were begun"
            )
        used = sorted(ended[-1][0].came)
        arrivals = {
            index: statistics.median(
                step.came[index] - step.began for step, _ in ended if index in step.came
            )
            for index in used
        }
        first, last = min(arrivals.values()), max(arrivals.values())
        seconds = [duration for _, duration in ended]
        whole = _usual(seconds)
        with on_device_of(self._parameters):
            slowest = seconds if group is None else _slowest(seconds, group)
        return Workload(
            name,
            tuple(Layer(self._names[index], self._shapes[index], 0.0) for index in used),
            forward_s=first,
            backward_s=last - first,
            optimizer_s=max(whole - last, 0.0),
            ready_s=tuple(arrivals[index] - first for index in used),
            per_bucket_overhead_s=max(_usual(slowest) - whole, 0.0),
        )


def _usual(seconds: Sequence[float]) -> float:
    """Returns the mean of the steps that took less than twice the median."""
    middle = statistics.median(seconds)
    return statistics.fmean(duration for duration in seconds if duration <= 2 * middle)


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
    """Runs some steps and returns their workload.

    The steps must not communicate: use the model without DistributedDataParallel, or with the hook
    "noop".

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
