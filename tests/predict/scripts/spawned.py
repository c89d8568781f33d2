"""Trains in processes of ``mp.spawn``, as PyTorch's DDP tutorial."""

import os
import socket
import sys

import shapes
import torch.distributed as dist
import torch.multiprocessing as mp


def demo_basic(rank, world_size, port, steps):
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    shapes.run("plain", steps)
    dist.destroy_process_group()
    print(f"Finished running basic DDP example on rank {rank}.")


if __name__ == "__main__":
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    mp.spawn(demo_basic, args=(2, port, steps), nprocs=2, join=True)
