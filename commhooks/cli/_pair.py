"""Averages a tensor with another process; ``commhooks doctor`` runs this module twice."""

from __future__ import annotations

import sys
from datetime import timedelta

import torch
import torch.distributed as dist

import commhooks

__all__ = ["exchange"]


def exchange(meeting: str, rank: int, limit_s: float) -> None:
    """Averages a tensor by "int8", and raises RuntimeError if the mean is not near the exact one.

    Args:
        meeting: path of a file by which the two processes find each other.
        rank: 0 or 1.
        limit_s: seconds within which the other has to come.
    """
    dist.init_process_group(
        "gloo",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=limit_s),
    )
    try:
        both = [torch.randn(4096, generator=torch.Generator().manual_seed(i)) for i in range(2)]
        mean, tensor = (both[0] + both[1]) / 2, both[rank].clone()
        commhooks.all_reduce(tensor, "int8", op=dist.ReduceOp.AVG)
        error = float((tensor - mean).norm() / mean.norm())
        if not error < 0.05:  # int8 is off by less than one percent
            raise RuntimeError(f"the mean of two ranks by int8 has an error of {error:.0%}")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    exchange(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
