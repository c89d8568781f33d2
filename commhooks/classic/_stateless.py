"""Defines hooks whose state is a process group, or None for the group of the model.

No ``from __future__ import annotations`` here: DistributedDataParallel compares the annotations of
a hook with the classes themselves and refuses strings.
"""

import functools
from typing import Any

import torch
from torch.distributed import GradBucket  # type: ignore[attr-defined]

from commhooks.classic._hooked_model import Group
from commhooks.classic._launch import BucketFuture, WireDtypes, classic_hook, launch_on_group
from commhooks.classic._minmax import MinMax, MinMaxPerChannel
from commhooks.core._dense import Dense
from commhooks.schemes.noop import Noop
from commhooks.wrappers._cast import Cast

__all__ = [
    "allreduce_hook",
    "bf16_compress_hook",
    "fp16_compress_hook",
    "noop_hook",
    "quantization_perchannel_hook",
    "quantization_pertensor_hook",
]

DENSE, NOOP, _MINMAX = Dense(), Noop(), MinMax()
_FP16, _BF16 = Cast(Dense(), torch.float16), Cast(Dense(), torch.bfloat16)


@classic_hook(functools.partial(launch_on_group, DENSE))
def allreduce_hook(process_group: Group, bucket: GradBucket) -> BucketFuture:
    """Averages a bucket by an all-reduce, bit for bit as DDP does without a hook.

    Args:
        process_group: ranks to average over; None: those of the model.

    Example:
        >>> ddp_model.register_comm_hook(None, allreduce_hook)
    """
    return launch_on_group(DENSE, process_group, bucket, ())


@classic_hook(functools.partial(launch_on_group, _FP16))
def fp16_compress_hook(process_group: Group, bucket: GradBucket) -> BucketFuture:
    """Averages a bucket in float16; divides before the cast, and warns once if a sum overflows.

    Args:
        process_group: ranks to average over; None: those of the model.

    Example:
        >>> ddp_model.register_comm_hook(None, fp16_compress_hook)
    """
    return launch_on_group(_FP16, process_group, bucket, ())


@classic_hook(functools.partial(launch_on_group, _BF16))
def bf16_compress_hook(process_group: Group, bucket: GradBucket) -> BucketFuture:
    """Averages a bucket in bfloat16, on any backend.

    Args:
        process_group: ranks to average over; None: those of the model.

    Example:
        >>> ddp_model.register_comm_hook(None, bf16_compress_hook)
    """
    return launch_on_group(_BF16, process_group, bucket, ())


# DDP refuses a hook with the name "bf16_compress_hook" where torch is built without NCCL or XCCL,
# though Gloo sums bfloat16.
bf16_compress_hook.__name__ = "bf16_hook"


def _launch_noop(_: Any, bucket: GradBucket, wire_dtypes: WireDtypes) -> BucketFuture:
    return launch_on_group(NOOP, None, bucket, wire_dtypes)


@classic_hook(_launch_noop)
def noop_hook(_: Any, bucket: GradBucket) -> BucketFuture:
    """Returns the local gradient, so that ranks diverge: for measuring what communication costs.

    Example:
        >>> ddp_model.register_comm_hook(None, noop_hook)
    """
    return _launch_noop(_, bucket, ())


@classic_hook(functools.partial(launch_on_group, _MINMAX))
def quantization_pertensor_hook(process_group: Group, bucket: GradBucket) -> BucketFuture:
    """Averages a bucket by an all-gather of 256 levels between its minimum and maximum.

    Args:
        process_group: ranks to average over; None: those of the model.

    Example:
        >>> ddp_model.register_comm_hook(None, quantization_pertensor_hook)
    """
    return launch_on_group(_MINMAX, process_group, bucket, ())


@classic_hook(functools.partial(launch_on_group, MinMaxPerChannel()))
def quantization_perchannel_hook(
    process_group: Group, bucket: GradBucket, bucket_size: int = 512
) -> BucketFuture:
    """Averages a bucket by an all-gather of 256 levels per block of ``bucket_size`` entries.

    Args:
        process_group: ranks to average over; None: those of the model.
        bucket_size: entries per block.

    Example:
        >>> ddp_model.register_comm_hook(None, quantization_perchannel_hook)
    """
    return launch_on_group(MinMaxPerChannel(bucket_size), process_group, bucket, ())
