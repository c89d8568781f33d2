"""Trains a small network with Ray Train on two workers, and goes on where it stopped.

python in_ray.py folder --epochs 2
python in_ray.py folder --epochs 4  # goes on with the third
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model
from torch.utils.data import DataLoader, TensorDataset

from commhooks.hosts.ray import CommHook


def dataset() -> TensorDataset:
    """Points of three classes, the same on every worker."""
    points = torch.randn(160, 16, generator=torch.Generator().manual_seed(0))
    return TensorDataset(points, points[:, :3].argmax(dim=1))


def train(config: dict[str, Any]) -> None:
    """Trains on every worker, and goes on from a checkpoint if there is one."""
    torch.manual_seed(0)
    model = prepare_model(
        torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 3))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = prepare_data_loader(DataLoader(dataset(), batch_size=10, shuffle=True))
    comm = CommHook("powersgd", rank=2, start_step=3).attach(model)

    first, checkpoint = 0, ray.train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as folder:
            saved = torch.load(Path(folder, "model.pt"))
            comm.load(folder)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["epoch"] + 1
    for epoch in range(first, config["epochs"]):
        loader.sampler.set_epoch(epoch)
        for points, classes in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(points), classes).backward()
            optimizer.step()
        with tempfile.TemporaryDirectory() as folder:
            comm.save(folder)  # all workers call it; rank 0 writes
            saved = None
            if ray.train.get_context().get_world_rank() == 0:
                content = {
                    "epoch": epoch,
                    "model": model.module.state_dict(),
                    "optimizer": optimizer.state_dict(),
                }
                torch.save(content, Path(folder, "model.pt"))
                saved = Checkpoint.from_directory(folder)
            ray.train.report({"epoch": epoch, **comm.metrics()}, checkpoint=saved)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--epochs", type=int, default=4)
    args = parser.parse_args()

    ray.init(num_cpus=2, include_dashboard=False)
    trainer = TorchTrainer(
        train,
        train_loop_config={"epochs": args.epochs},
        scaling_config=ScalingConfig(num_workers=2),  # with GPUs: use_gpu=True
        run_config=RunConfig(storage_path=str(args.folder.resolve()), name="example"),
    )
    result = trainer.fit()
    print(f"epoch {result.metrics['epoch']}, checkpoint {result.checkpoint.path}")


if __name__ == "__main__":
    main()
