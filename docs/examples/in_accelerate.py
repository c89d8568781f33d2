"""Trains a small network with Hugging Face Accelerate, and goes on where it stopped.

torchrun --nproc-per-node 2 in_accelerate.py folder --epochs 2
torchrun --nproc-per-node 2 in_accelerate.py folder --epochs 4  # goes on with the third
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

from commhooks.hosts.accelerate import CommHook


def dataset() -> TensorDataset:
    """Points of three classes, the same on every process."""
    points = torch.randn(160, 16, generator=torch.Generator().manual_seed(0))
    return TensorDataset(points, points[:, :3].argmax(dim=1))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--epochs", type=int, default=4)
    args = parser.parse_args()

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)  # with GPUs: no cpu=True
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(dataset(), batch_size=5)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    comm = CommHook("powersgd", rank=2, start_step=3).attach(accelerator, model)

    first = sum(1 for _ in args.folder.glob("epoch*"))
    if first:
        accelerator.load_state(args.folder / f"epoch{first}")
    for epoch in range(first, args.epochs):
        for points, classes in loader:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.cross_entropy(model(points), classes)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        accelerator.save_state(args.folder / f"epoch{epoch + 1}")
    if accelerator.is_main_process:
        print(comm.hook.summary())
    accelerator.end_training()


if __name__ == "__main__":
    main()
