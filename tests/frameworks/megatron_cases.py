"""Megatron-Core: gradients of its DistributedDataParallel, reduced to shards by a scheme."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    param_and_grad_buffer,
)
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from commhooks.hosts.megatron import ReduceScatter
from tests.frameworks.told import main, network

STEPS = 3
SCHEMES = ("none", "bf16", "int8")


def shards(overlap: bool, dtype: torch.dtype) -> list[Tensor]:
    """This rank's part of the gradients of each step."""
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        overlap_grad_reduce=overlap,
        reduce_scatter_with_fp32_accumulation=True,
        bucket_size=500,  # several buckets, where they overlap
    )
    layers = TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=1)
    model = DistributedDataParallel(layers, config, network().to(dtype))
    rank, found = dist.get_rank(), []
    for step in range(STEPS):
        model.zero_grad_buffer()
        points = torch.randn(8, 16, generator=torch.Generator().manual_seed(10 * step + rank))
        model(points.to(dtype)).square().sum().backward()
        model.finish_grad_sync()
        buckets = [bucket for group in model.bucket_groups for bucket in group.buckets]
        found.append(torch.cat([one.grad_data.chunk(2)[rank].float() for one in buckets]))
    return found


def reduces(folder: Path) -> dict[str, Any]:
    """The largest error against Megatron-Core's own reduce-scatter, by scheme."""
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
    parallel_state.initialize_model_parallel()
    own, errors = param_and_grad_buffer.reduce_scatter_with_fp32_accumulation, {}
    for overlap in (False, True):
        for dtype in (torch.float32, torch.bfloat16):
            param_and_grad_buffer.reduce_scatter_with_fp32_accumulation = own
            exact = shards(overlap, dtype)
            for scheme in SCHEMES:
                param_and_grad_buffer.reduce_scatter_with_fp32_accumulation = ReduceScatter(scheme)
                pairs = zip(shards(overlap, dtype), exact, strict=True)
                error = max(float((one - two).norm() / two.norm()) for one, two in pairs)
                errors[f"{scheme} {dtype} {overlap}"] = error
    dist.destroy_process_group()
    return errors


if __name__ == "__main__":
    main(reduces=reduces)
