"""Trains a small network with Lightning, and goes on where it stopped.

torchrun --nproc-per-node 2 in_lightning.py folder --epochs 2
torchrun --nproc-per-node 2 in_lightning.py folder --epochs 4  # goes on with the third
"""

import argparse
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from commhooks.hosts.lightning import CommHook


class Classifier(L.LightningModule):
    """Two layers for points of three classes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 3)
        )

    def training_step(self, batch, _):
        points, classes = batch
        return torch.nn.functional.cross_entropy(self.layers(points), classes)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def dataset() -> TensorDataset:
    """Points of three classes, the same on every process."""
    points = torch.randn(160, 16, generator=torch.Generator().manual_seed(0))
    return TensorDataset(points, points[:, :3].argmax(dim=1))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--epochs", type=int, default=4)
    args = parser.parse_args()

    L.seed_everything(0)
    model = Classifier()
    comm = CommHook("powersgd", rank=2, start_step=3)
    trainer = L.Trainer(
        accelerator="cpu",  # with GPUs: "gpu"
        devices=2,
        strategy="ddp",
        max_epochs=args.epochs,
        callbacks=[ModelCheckpoint(args.folder, save_last=True), comm],
        default_root_dir=args.folder,
        enable_progress_bar=False,
    )
    last = args.folder / "last.ckpt"
    loader = DataLoader(dataset(), batch_size=10, shuffle=True)
    trainer.fit(model, loader, ckpt_path=last if last.exists() else None)
    if trainer.is_global_zero:
        print(comm.hook.summary())


if __name__ == "__main__":
    main()
