"""Hugging Face Accelerate: accumulation, what is refused, and copies on every node."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.utils import DDPCommunicationHookType, ProjectConfiguration

import commhooks
from commhooks.hosts.accelerate import CommHook
from tests.frameworks.report_probe import attempt, batch, digest, main, network


def prepared(accelerator: Accelerator) -> tuple[Any, Any]:
    model = network()
    return accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))


def steps(accelerator: Accelerator, model: Any, optimizer: Any, number: int) -> None:
    for step in range(2 * number):
        points, classes = batch(step, accelerator.process_index)
        with accelerator.accumulate(model):
            accelerator.backward(torch.nn.functional.cross_entropy(model(points), classes))
            optimizer.step()
            optimizer.zero_grad()


def trains(folder: Path) -> dict[str, Any]:
    """The weights after training with each scheme, and without a hook."""
    facts: dict[str, Any] = {}
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    for scheme in (None, "none", "int8"):
        model, optimizer = prepared(accelerator)
        comm = None if scheme is None else CommHook(scheme).attach(accelerator, model)
        steps(accelerator, model, optimizer, 6)
        facts[str(scheme)] = [digest(model), 0 if comm is None else comm.hook.step]
    accelerator.end_training()
    return facts


def refuses(folder: Path) -> dict[str, Any]:
    """The errors where a hook would not run."""

    def with_hook(given: Any) -> None:
        kwargs = DistributedDataParallelKwargs(comm_hook=given)
        accelerator = Accelerator(cpu=True, kwargs_handlers=[kwargs])
        CommHook("int8").attach(accelerator, prepared(accelerator)[0])

    refusals = {
        "of the enum": attempt(lambda: with_hook(DDPCommunicationHookType.POWER_SGD)),
        "a function": attempt(lambda: with_hook(commhooks.powerSGD_hook)),
        "not prepared": attempt(lambda: CommHook("int8").attach(Accelerator(cpu=True), network())),
    }
    Accelerator(cpu=True).end_training()
    return refusals


def alone(folder: Path) -> dict[str, Any]:
    """One process, whose model Accelerate does not wrap: a script runs as it is."""
    accelerator = Accelerator(cpu=True)
    model, optimizer = prepared(accelerator)
    with pytest.warns(RuntimeWarning, match="there is one process") as caught:
        comm = CommHook("int8").attach(accelerator, model)
    steps(accelerator, model, optimizer, 2)
    accelerator.save_state(folder / "saved")
    accelerator.load_state(folder / "saved")
    return {
        "said": len(caught),
        "metrics": comm.metrics(),
        "wrong": attempt(lambda: CommHook(model)),
    }


def copies(folder: Path) -> dict[str, Any]:
    """A checkpoint that every node keeps: each rank could be the one that saves."""
    project = ProjectConfiguration(save_on_each_node=True)
    accelerator = Accelerator(cpu=True, project_config=project)
    model, optimizer = prepared(accelerator)
    comm = CommHook("topk", ratio=0.05).attach(accelerator, model)
    steps(accelerator, model, optimizer, 2)
    before = comm.hook.residual("0.weight")
    state = comm.state_dict()
    accelerator.save_state(folder / "saved")
    steps(accelerator, model, optimizer, 2)
    accelerator.load_state(folder / "saved")
    after = comm.hook.residual("0.weight")
    accelerator.end_training()
    return {"parts": sorted(key for key in state if key[:4] == "rank"), "same": after.equal(before)}


if __name__ == "__main__":
    main(trains=trains, refuses=refuses, alone=alone, copies=copies)
