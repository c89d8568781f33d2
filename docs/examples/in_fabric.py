"""Trains a small network with Lightning Fabric, and goes on where it stopped.

torchrun --nproc-per-node 2 in_fabric.py folder --epochs 2
torchrun --nproc-per-node 2 in_fabric.py folder --epochs 4  # goes on with the third
"""

import argparse
from pathlib import Path

import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader, TensorDataset

from commhooks.hosts.fabric import CommHook


def dataset() -> TensorDataset:
    """Points of three classes, the same on every process."""
    points = torch.randn(160, 16, generator=torch.Generator().manual_seed(0))
    return TensorDataset(points, points[:, :3].argmax(dim=1))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--epochs", type=int, default=4)
    args = parser.parse_args()

    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")  # with GPUs: "gpu"
    fabric.launch()
    fabric.seed_everything(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(DataLoader(dataset(), batch_size=10))
    comm = CommHook("powersgd", rank=2, start_step=3).attach(fabric, model)

    state = {"model": model, "optimizer": optimizer, "epoch": 0, "comm": comm}
    last = args.folder / "last.ckpt"
    if last.exists():
        fabric.load(last, state)
    for epoch in range(state["epoch"], args.epochs):
        for points, classes in loader:
            optimizer.zero_grad()
            fabric.backward(torch.nn.functional.cross_entropy(model(points), classes))
            optimizer.step()
        state["epoch"] = epoch + 1
        fabric.save(last, state)
    if fabric.is_global_zero:
        print(comm.hook.summary())


if __name__ == "__main__":
    main()
