"""Megatron-Core: gradients of its DistributedDataParallel, reduced to shards by a scheme."""

from __future__ import annotations

import gc
import os
import warnings
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
from tests.frameworks.report_probe import main, network

STEPS = 3
SCHEMES = ("none", "bf16", "int8")


def wrapped(overlap: bool, dtype: torch.dtype, by_function: bool = True) -> Any:
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        overlap_grad_reduce=overlap,
        reduce_scatter_with_fp32_accumulation=by_function,
        bucket_size=500,  # several buckets, where they overlap
    )
    layers = TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=1)
    return DistributedDataParallel(layers, config, network().to(dtype))


def trained(model: Any, dtype: torch.dtype) -> list[Tensor]:
    """Returns the shard of gradients on the local rank, for each step."""
    rank, results = dist.get_rank(), []
    for step in range(STEPS):
        model.zero_grad_buffer()
        points = torch.randn(8, 16, generator=torch.Generator().manual_seed(10 * step + rank))
        model(points.to(dtype)).square().sum().backward()
        model.finish_grad_sync()
        buckets = [bucket for group in model.bucket_groups for bucket in group.buckets]
        results.append(torch.cat([bucket.grad_data.chunk(2)[rank].float() for bucket in buckets]))
    return results


def shards(overlap: bool, dtype: torch.dtype) -> list[Tensor]:
    return trained(wrapped(overlap, dtype), dtype)


def begin() -> None:
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
    parallel_state.initialize_model_parallel()


def reduces(folder: Path) -> dict[str, Any]:
    """The largest error against Megatron-Core's own reduce-scatter, by scheme."""
    begin()
    original, errors = param_and_grad_buffer.reduce_scatter_with_fp32_accumulation, {}
    for overlap in (False, True):
        for dtype in (torch.float32, torch.bfloat16):
            param_and_grad_buffer.reduce_scatter_with_fp32_accumulation = original
            exact = shards(overlap, dtype)
            for scheme in SCHEMES:
                param_and_grad_buffer.reduce_scatter_with_fp32_accumulation = ReduceScatter(scheme)
                pairs = zip(shards(overlap, dtype), exact, strict=True)
                error = max(float((left - right).norm() / right.norm()) for left, right in pairs)
                errors[f"{scheme} {dtype} {overlap}"] = error
    dist.destroy_process_group()
    return errors


def left_out(folder: Path) -> dict[str, Any]:
    """Shows the warning at the end of a function that Megatron-Core did not call."""
    begin()
    original, facts = param_and_grad_buffer.reduce_scatter_with_fp32_accumulation, {}
    for how in ("in time", "after the model was made", "without the setting"):
        late = how == "after the model was made"
        model = wrapped(False, torch.float32) if late else None
        param_and_grad_buffer.reduce_scatter_with_fp32_accumulation = ReduceScatter("int8")
        if model is None:
            model = wrapped(False, torch.float32, how == "in time")
        trained(model, torch.float32)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            del model
            param_and_grad_buffer.reduce_scatter_with_fp32_accumulation = original
            gc.collect()
        facts[how] = [
            str(warning.message) for warning in caught if "never called" in str(warning.message)
        ]
    dist.destroy_process_group()
    return facts


if __name__ == "__main__":
    main(reduces=reduces, left_out=left_out)
