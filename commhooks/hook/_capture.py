"""Raises where torch.compile or a CUDA graph would replay a step that must run as Python."""

from __future__ import annotations

from typing import Any

import torch

from commhooks.core._dense import Dense
from commhooks.core._scheme import Scheme
from commhooks.errors import HookNotAttachedError, RegistrationError
from commhooks.schemes.noop import Noop
from commhooks.wrappers._base import Coalesced
from commhooks.wrappers._cast import Cast
from commhooks.wrappers._make import short_repr

__all__ = ["check_cuda_graph", "check_is_bucket"]


def check_is_bucket(bucket: Any) -> None:
    """Raises if torch.compile calls a hook with a tuple in place of a bucket."""
    if isinstance(bucket, tuple):
        raise HookNotAttachedError(
            "torch.compile runs with torch._dynamo.config.optimize_ddp = 'python_reducer', "
            "which hands hooks a (gradient, parameter) tuple and ignores what they return. "
            "Set optimize_ddp = True (the default), which keeps buckets"
        )


def check_cuda_graph(device: torch.device, scheme: Scheme, *, agreed: bool) -> None:
    """Raises while a CUDA graph is captured on ``device``, unless replays repeat the step exactly.

    A replay runs the same kernels with the same arguments. The number of the step, from which
    random bits and schedules follow, and the choice of the tensors that a scheme keeps are the
    host's, so replays would use those of the captured step for ever.

    Args:
        agreed: whether the ranks have compared facts, which waits for the device.
    """
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        return
    call = "commhooks: this step is being captured in a CUDA graph"
    if not _is_same_in_every_step(scheme):
        raise RegistrationError(
            f"{call}, and replays would repeat what {short_repr(scheme)} has kept, drawn or chosen "
            f"in it. Run the steps without capture, or use a scheme that does the same in every "
            f"step: 'allreduce', 'fp16' or 'bf16'"
        )
    if not agreed:
        raise RegistrationError(
            f"{call}, and the ranks have not met: in the first step of a hook they compare what "
            f"they run. Run a step (DistributedDataParallel needs 11) before the capture"
        )


def _is_same_in_every_step(scheme: Scheme) -> bool:
    while isinstance(scheme, Cast | Coalesced):
        scheme = scheme.scheme
    return type(scheme) in (Dense, Noop)
