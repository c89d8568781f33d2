"""Puts a scheme into torchft, in the signatures of its own quantized collectives.

``torchft.collectives`` has functions of these names, by fp8 and for a GPU. These take any scheme
that keeps nothing between calls, and run over Gloo as well.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from commhooks.core.scheme import Scheme, slots_of
from commhooks.errors import RegistrationError
from commhooks.hook.call import Handle
from commhooks.hosts.collectives import Collectives
from commhooks.wrappers.make import describe, make

__all__ = ["allreduce_quantized", "group_inside", "reduce_scatter_quantized"]

# What runs a scheme in a group of torchft's, and the group of torch's that was inside then.
_made: WeakKeyDictionary[Any, dict[tuple[str, str], tuple[Collectives, Any]]] = WeakKeyDictionary()


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
    calls = _calls(process_group, device, scheme, options)
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
    calls = _calls(process_group, device, scheme, options)
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


def group_inside(process_group: Any) -> Any:
    """Returns the group of torch's that torchft's wrappers have inside."""
    while getattr(process_group, "_pg", None) is not None:
        process_group = process_group._pg
    return process_group


def _calls(
    process_group: Any, device: torch.device, scheme: str | Scheme, options: dict[str, Any]
) -> Collectives:
    """Returns what makes a call, which has followed the quorum."""
    named = scheme if isinstance(scheme, str) else describe(scheme)
    key, made = (named, repr(sorted(options.items()))), _made.setdefault(process_group, {})
    calls, before = made.get(key, (None, None))
    if calls is None:
        built = make(scheme, **options)
        if slots_of(built):
            raise RegistrationError(
                f"torchft: {built} keeps memory of each tensor between calls, and torchft does not "
                f"name tensors; commhooks.hosts.torchft.register keeps it by parameter"
            )
        # A group of this rank alone until there is a quorum; nothing is sent in it.
        calls = Collectives(built, dist.ProcessGroup(0, 1))  # type: ignore[call-arg]
    inside = group_inside(process_group)
    if inside is not before:
        # Not made anew: random draws would begin again with every quorum.
        calls._binding.also_on = device
        calls.change_group(inside)
        made[key] = (calls, inside)
    return calls


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
