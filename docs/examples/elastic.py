"""Trains a small network under torchrun, and goes on where it stopped, on any number of workers.

torchrun --nproc-per-node 4 elastic.py snapshot.pt --epochs 50   # stop it, or kill a worker
torchrun --nproc-per-node 2 elastic.py snapshot.pt --epochs 50   # goes on, with half of them
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import commhooks


def dataset() -> TensorDataset:
    """Points of three classes, the same on every worker."""
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(600, 16, generator=generator)
    return TensorDataset(points, points[:, :3].argmax(dim=1))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("snapshot")
    parser.add_argument("--epochs", type=int, default=50)
    args = parser.parse_args()

    dist.init_process_group("gloo")  # torchrun has set rank, world size and where to meet
    rank, workers = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 3))
    ddp_model = DistributedDataParallel(model)
    hook = commhooks.register(ddp_model, "powersgd", rank=1, start_step=5)
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.05, momentum=0.9)

    first = 0
    if os.path.exists(args.snapshot):
        saved = torch.load(args.snapshot)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        hook.load_state_dict(saved["hook"])  # of all workers there were; on any number of them
        first = saved["epoch"] + 1
        if rank == 0:
            were = saved["hook"]["world_size"]
            print(f"goes on at epoch {first} on {workers} workers, saved on {were}", flush=True)

    data = dataset()
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=10, sampler=sampler)
    for epoch in range(first, args.epochs):
        sampler.set_epoch(epoch)  # another order in every epoch; without it always the first
        for points, classes in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(ddp_model(points), classes)
            loss.backward()
            optimizer.step()
        hook_state = hook.state_dict(gather=True, dst=0)  # all workers call it, one gets it
        if rank == 0:
            saved = {
                "epoch": epoch,
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "hook": hook_state,
            }
            torch.save(saved, f"{args.snapshot}.new")
            os.replace(f"{args.snapshot}.new", args.snapshot)  # whole, or the one before
            print(f"epoch {epoch} on {workers} workers: loss {loss.item():.3f}", flush=True)

    if rank == 0:
        print(hook.summary(), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
