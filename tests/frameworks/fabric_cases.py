"""Lightning Fabric: accumulation, what is refused, and a checkpoint for another number of ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric

from commhooks.hosts.fabric import CommHook
from tests.frameworks.report_probe import attempt, batch, digest, main, network


def launched() -> Fabric:
    fabric = Fabric(accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy="ddp")
    fabric.launch()
    return fabric


def steps(fabric: Fabric, model: Any, optimizer: Any, number: int) -> None:
    """Steps of two batches, of which the second synchronises."""
    for step in range(2 * number):
        points, classes = batch(step, fabric.global_rank)
        with fabric.no_backward_sync(model, enabled=step % 2 == 0):
            fabric.backward(torch.nn.functional.cross_entropy(model(points), classes))
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()


def set_up(fabric: Fabric) -> tuple[Any, Any]:
    model = network()
    return fabric.setup(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))


def trains(folder: Path) -> dict[str, Any]:
    """The weights after training with each scheme, and without a hook."""
    facts: dict[str, Any] = {}
    fabric = launched()
    for scheme in (None, "none", "int8"):
        model, optimizer = set_up(fabric)
        comm = None if scheme is None else CommHook(scheme).attach(fabric, model)
        steps(fabric, model, optimizer, 6)
        facts[str(scheme)] = [digest(model), 0 if comm is None else comm.hook.step]
    return facts


def step_and_residual(comm: CommHook) -> dict[str, Any]:
    """The hook's step and this rank's residual; a new rank has none yet, which is zero."""
    residual = comm.hook.residual("0.weight")
    values = torch.zeros(64, 16) if residual is None else residual
    return {"step": comm.hook.step, "residual": values.tolist()}


def saves(folder: Path) -> dict[str, Any]:
    """A checkpoint with residuals; this rank's, for one parameter."""
    fabric = launched()
    model, optimizer = set_up(fabric)
    comm = CommHook("topk", ratio=0.05).attach(fabric, model)
    steps(fabric, model, optimizer, 4)
    fabric.save(folder / "saved", {"model": model, "comm": comm})
    return step_and_residual(comm)


def loads(folder: Path) -> dict[str, Any]:
    """The residual that this rank continues from."""
    fabric = launched()
    model, _ = set_up(fabric)
    comm = CommHook("topk", ratio=0.05).attach(fabric, model)
    fabric.load(folder / "saved", {"model": model, "comm": comm})
    return step_and_residual(comm)


def refuses(folder: Path) -> dict[str, Any]:
    """The errors where a hook would not run."""
    fabric = launched()
    return {"not set up": attempt(lambda: CommHook("int8").attach(fabric, network()))}


def alone(folder: Path) -> dict[str, Any]:
    """One device, whose model Fabric does not wrap."""
    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    model, _ = set_up(fabric)
    with pytest.warns(RuntimeWarning, match="there is one process"):
        return {"step": CommHook("int8").attach(fabric, model).hook.step}


if __name__ == "__main__":
    main(trains=trains, saves=saves, loads=loads, refuses=refuses, alone=alone)
