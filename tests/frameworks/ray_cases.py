"""Ray Train: a worker that dies in the example's training function."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import ray.train
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from tests.frameworks.jobs import EXAMPLES
from tests.frameworks.report_probe import main


def dying(config: dict[str, Any]) -> None:
    """The example's function; rank 1 ends in its second epoch, the first time."""
    sys.path.insert(0, str(EXAMPLES))
    import in_ray

    report, mark = ray.train.report, Path(config["mark"])

    def reported(metrics: dict[str, Any], checkpoint: Any = None) -> None:
        report(metrics, checkpoint=checkpoint)
        rank = ray.train.get_context().get_world_rank()
        if rank == 1 and metrics["epoch"] == 1 and not mark.exists():
            mark.touch()
            os._exit(1)

    ray.train.report = reported
    in_ray.train(config)


def dies(folder: Path) -> dict[str, Any]:
    """The last epoch, and where its checkpoint is."""
    ray.init(num_cpus=2, include_dashboard=False)
    result = TorchTrainer(
        dying,
        train_loop_config={"epochs": 4, "mark": str(folder / "mark")},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            storage_path=str(folder), name="dies", failure_config=FailureConfig(max_failures=1)
        ),
    ).fit()
    return {"epoch": result.metrics["epoch"], "died": (folder / "mark").exists()}


if __name__ == "__main__":
    main(dies=dies)
