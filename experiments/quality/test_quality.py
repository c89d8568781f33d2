"""The study of quality: real ranks, interrupted runs, verdicts, rehearsals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commhooks
from experiments.quality.run import Trainer, schedule
from experiments.quality.setups import SETUPS, Arm, Setup
from experiments.tools.processes import run_ranks

STEPS = 12


def _arm(setup: Setup, name: str) -> Arm:
    return next(arm for arm in setup.arms if arm.name == name)


def _flat(model: nn.Module) -> list[float]:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()


# ---- simulated and real ranks


def _real(rank: int, world_size: int, send: Callable[[Any], None], names: list[str]) -> None:
    for name in names:
        setup = SETUPS[name]
        entry = _arm(setup, "int8").entry
        task = setup.task(world_size, batch_size=4, seed=3)
        torch.manual_seed(3)
        # Buckets are rebuilt in another order where DistributedDataParallel knows that all
        # parameters are used; the names of random draws would be those of other parameters.
        model = DistributedDataParallel(
            task.model(), bucket_cap_mb=100, find_unused_parameters=True
        )
        commhooks.register(model, entry.scheme, seed=3, **entry.options_with(None))
        optimizer = task.optimizer(model)
        rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: schedule(step, STEPS))
        for step in range(STEPS):
            optimizer.zero_grad()
            x, target = task.batch(rank, step)
            task.loss(model(x), target).backward()
            optimizer.step()
            rates.step()
        if rank == 0:
            send((name, _flat(model.module), task.evaluate(model.module)))


@pytest.mark.slow
@pytest.mark.distributed
def test_simulated_ranks_train_as_real_ones_bit_for_bit() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in each process: sums are split by threads
    try:
        for name, parameters, judged in run_ranks(_real, 2, ["characters", "digits", "lstm"]):
            setup = SETUPS[name]
            task = setup.task(2, batch_size=4, seed=3)
            trainer = Trainer(task, _arm(setup, "int8"), ranks=2, seed=3, steps=STEPS)
            for _ in range(STEPS):
                trainer.update(trainer.exchange(trainer.gradients()))
            assert _flat(trainer.model) == parameters, name
            assert trainer.evaluate() == judged
    finally:
        torch.set_num_threads(threads)
