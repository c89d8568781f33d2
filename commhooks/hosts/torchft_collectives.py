"""Puts a scheme into torchft, in the signatures of its own quantized collectives.

``torchft.collectives`` has functions of these names, by fp8 and for a GPU. These take any scheme
that keeps nothing between calls, and run over Gloo as well.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from commhooks.core.scheme import Scheme
from commhooks.hook.call import Handle
from commhooks.hosts.torchft_quorum import calls_of

__all__ = ["allreduce_quantized", "reduce_scatter_quantized"]


def allreduce_quantized(
    tensors: list[Tensor],
    opts: Any,
    process_group: dist.ProcessGroup,
    sync_stream: torch.Stream | None = None,
    *,
    scheme: str | Scheme = "fp8",
    **options: Any,
) -> dist.Work:
    """Reduces tensors over the ranks of a torchft group by a scheme, each in place.

    Takes the place of ``torchft.collectives.allreduce_quantized``, whose arguments it has. All
    ranks of a quorum make the same calls.

    Args:
        tensors: dense, of any shape, on one device.
        opts: ``ReduceOp.SUM`` or ``AVG``, or options with one of them as ``reduceOp``.
        process_group: of torchft, made of torch's, or of ``torch.distributed``.
        sync_stream: the stream that the exchange comes after; by default the current one.
        scheme: a name or a scheme that keeps nothing between calls.
        options: of the scheme, see :func:`commhooks.make`.

    Returns:
        A handle; after ``wait()`` the tensors have the results in the current stream's order.

    Raises:
        RegistrationError: the scheme keeps memory, and torchft does not name tensors.
        ValueError: another operation.
        MismatchError: the ranks differ in scheme, options or versions (first call of a quorum).

    Example:
        >>> torchft.manager.allreduce_quantized = partial(allreduce_quantized, scheme="int8")
    """
    device, op = tensors[0].device, getattr(opts, "reduceOp", opts)
    calls = calls_of(process_group, device, scheme, options)
    with _after(sync_stream, device):
        works = [
            calls.all_reduce(one, f"tensor {place}", op=op, async_op=True)
            for place, one in enumerate(tensors)
        ]
    return _all(works, device, process_group, opts)


def reduce_scatter_quantized(
    output: Tensor,
    inputs: list[Tensor],
    opts: Any,
    process_group: dist.ProcessGroup,
    sync_stream: torch.Stream | None = None,
    *,
    scheme: str | Scheme = "fp8",
    **options: Any,
) -> dist.Work:
    """Reduces tensors over the ranks of a torchft group, of which each gets its rows of each.

    Takes the place of ``torchft.collectives.reduce_scatter_quantized``, whose arguments it has.

    Args:
        output: this rank's rows of all inputs, one after the other, as
            ``torchft.collectives.allocate_reduce_scatter_output`` makes it.
        inputs: dense; zeros are added until the number of rows is a multiple of that of the ranks.
        opts, process_group, sync_stream, scheme, options: see :func:`allreduce_quantized`.
    """
    device, op = output.device, getattr(opts, "reduceOp", opts)
    calls = calls_of(process_group, device, scheme, options)
    ranks, works, begin = calls.world_size, [], 0
    with _after(sync_stream, device):
        for place, one in enumerate(inputs):
            missing = -len(one) % ranks
            rows = torch.cat([one, one.new_zeros(missing, *one.shape[1:])]) if missing else one
            part = output.view(-1)[begin : begin + rows.numel() // ranks]
            begin += part.numel()
            name = f"parts of tensor {place}"
            works.append(calls.reduce_scatter(part, rows, name, op=op, async_op=True))
    return _all(works, device, process_group, opts)


def _after(stream: torch.Stream | None, device: torch.device) -> AbstractContextManager[Any]:
    """Makes ``stream`` current, behind what the current one has to do."""
    if stream is None or device.type == "cpu":
        return ExitStack()
    stream.wait_stream(torch.accelerator.current_stream())
    return stream


def _all(works: list[Any], device: torch.device, process_group: Any, opts: Any) -> dist.Work:
    """Returns a handle of all calls, with the timeout that torchft gives to its own."""
    futures = [one.get_future() for one in works]
    together: Any = torch.futures.collect_all(futures)
    done = together.then(lambda _: [one.value() for one in futures])
    work: dist.Work = Handle(done, device)
    while (outer := getattr(process_group, "_wrap_work", None)) is not None:
        work, process_group = outer(work, opts), process_group._pg
    return work
