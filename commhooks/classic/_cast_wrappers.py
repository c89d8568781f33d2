"""Defines hooks around hooks, which send the payloads of any hook in 16 bits.

No ``from __future__ import annotations`` here: DistributedDataParallel compares the annotations of
a hook with the classes themselves and refuses strings.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]

from commhooks.classic._launch import BucketFuture, Classic, HookFunction, classic_hook, classics
from commhooks.hook._hook_function import comm_hook

__all__ = ["bf16_compress_wrapper", "fp16_compress_wrapper"]


def fp16_compress_wrapper(hook: HookFunction) -> HookFunction:
    """Returns a hook that runs ``hook`` with float16 payloads; it takes the state of ``hook``.

    Casts the payloads of a hook of this package, whose residuals stay in float32. Any other hook
    gets the bucket in float16, and its result is cast back.

    Example:
        >>> state = PowerSGDState(None, start_powerSGD_iter=10)
        >>> ddp_model.register_comm_hook(state, fp16_compress_wrapper(powerSGD_hook))
    """
    return _wrap(hook, torch.float16, "fp16_compress_wrapper_hook")


def bf16_compress_wrapper(hook: HookFunction) -> HookFunction:
    """Returns a hook that runs ``hook`` with bfloat16 payloads; it takes the state of ``hook``.

    See :func:`fp16_compress_wrapper`. Works on any backend.

    Example:
        >>> state = PowerSGDState(None, start_powerSGD_iter=10)
        >>> ddp_model.register_comm_hook(state, bf16_compress_wrapper(powerSGD_hook))
    """
    # Not torch's name: DDP refuses that where torch is built without NCCL or XCCL.
    return _wrap(hook, torch.bfloat16, "bf16_wrapper_hook")


def _wrap(hook: HookFunction, dtype: torch.dtype, name: str) -> HookFunction:
    # ``comm_hook`` would get a bucket that is rounded to 16 bits, an error that no residual keeps,
    # and schemes that compute in float32 would send float32 all the same.
    if hook is comm_hook:
        raise TypeError(
            f"{name}: comm_hook casts by its scheme; use commhooks.register(model, ..., "
            f"wire_dtype={str(dtype).removeprefix('torch.')!r}) or commhooks.wrappers.Cast"
        )
    inner = classics.get(hook)
    wrapped = _wrap_foreign(hook, dtype) if inner is None else _wrap_classic(inner, dtype)
    wrapped.__name__ = wrapped.__qualname__ = name
    return wrapped


def _wrap_classic(inner: Classic, dtype: torch.dtype) -> HookFunction:
    wire_dtypes = (*inner.wire_dtypes, dtype)

    def wrapped(hook_state: Any, bucket: GradBucket) -> BucketFuture:
        return inner.launch(hook_state, bucket, wire_dtypes)

    return classic_hook(inner.launch, wire_dtypes)(wrapped)


def _wrap_foreign(hook: HookFunction, dtype: torch.dtype) -> HookFunction:
    def wrapped(hook_state: Any, bucket: GradBucket) -> BucketFuture:
        original = bucket.buffer()
        bucket.set_buffer(original.to(dtype))

        def restore(done: torch.futures.Future[Any]) -> Tensor:
            value = done.value()
            # The future of a collective, which some hooks return as it is, has a list of tensors.
            result: Tensor = value[0] if isinstance(value, (list, tuple)) else value
            # Into the bucket's memory: DDP's gradients may be views of it.
            return original.copy_(result)

        return hook(hook_state, bucket).then(restore)

    return wrapped
