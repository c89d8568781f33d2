"""Trains under torchrun with gradient accumulation, mixed precision and a bare ``except``."""

import contextlib
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

ACCUMULATE = 3


def train_step(model, optimizer, scaler, device):
    for micro in range(ACCUMULATE):
        last = micro == ACCUMULATE - 1
        with contextlib.nullcontext() if last else model.no_sync():
            with torch.autocast(device, dtype=torch.bfloat16):
                out = model(torch.randn(16, 256, device=device))
                loss = (out.float() ** 2).mean() / ACCUMULATE
            scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)


def main():
    dist.init_process_group("gloo")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    module = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4))).to(device)
    model = DistributedDataParallel(module, bucket_cap_mb=0.3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler(device)
    for _ in range(int(sys.argv[1])):
        try:
            train_step(model, optimizer, scaler, device)
        except:  # noqa: E722  what people write
            print("a step failed, going on")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
