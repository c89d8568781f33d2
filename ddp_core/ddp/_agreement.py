"""Checks that ranks agree on the model, and on the arguments that decide which messages a step has.

Ranks compare when a model is wrapped, and when hooks shake hands. A difference would end in a wait
until the timeout, or in values of other tensors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_core.ddp._replica import Replica
from ddp_core.exchange._devices import on_device_of
from ddp_core.exchange._errors import MismatchError
from ddp_core.reducer._parameters import Trained

__all__ = ["check_across_ranks", "first_difference", "frozen_facts", "module_facts"]

# Not among them: what decides how gradients lie in memory (gradient_as_bucket_view,
# batched_grad_copy), and the sizes of buckets, where rank 0's hold.
_OPTIONS = (
    "find_unused_parameters",
    "static_graph",
    "skip_all_reduce_unused_params",  # a torch without it has it nowhere
)
_DTYPES = ("param_dtype", "reduce_dtype", "buffer_dtype")
_Fact = tuple[str, tuple[int, ...], tuple[int, ...], str]  # name, sizes, strides, dtype


def module_facts(
    ddp: Any, *, taken: bool = False, arguments: Sequence[str] = ()
) -> dict[str, list[str]]:
    """Returns what ranks must agree on besides trained parameters, by the names in messages.

    Args:
        ddp: a module of torch's or this package's DistributedDataParallel.
        taken: whether ranks are about to take rank 0's buffers, whatever they do in forward.
        arguments: further arguments, as text.
    """
    options = [f"{name}={getattr(ddp, name, None)!r}" for name in _OPTIONS]
    config = ddp.mixed_precision
    dtypes = None if config is None else [str(getattr(config, name)) for name in _DTYPES]
    # Older versions of torch have one of two names for it.
    syncs = bool(getattr(ddp, "forward_sync_buffers", getattr(ddp, "broadcast_buffers", True)))
    named = ddp.named_module_buffers
    options += [f"mixed_precision={dtypes}", f"forward_sync_buffers={syncs and bool(named)}"]
    options += arguments
    return {
        "buffers to synchronise": _described(named) if syncs or taken else [],
        "arguments of DistributedDataParallel": options,
    }


def _described(tensors: Mapping[str, Tensor]) -> list[str]:
    # Names, too: of two that change places each would take the other's values.
    return [
        f"{name!r} with sizes {list(tensor.shape)}, {tensor.dtype}"
        for name, tensor in tensors.items()
    ]


def frozen_facts(replica: Replica) -> dict[str, list[str]]:
    """Returns the frozen parameters, on which ranks must agree, for messages."""
    named = replica.module.named_parameters()
    ignored = replica.ignored
    frozen = {
        name: parameter
        for name, parameter in named
        if not parameter.requires_grad and name not in ignored
    }
    return {"frozen parameters": _described(frozen)}


def first_difference(everyone: Sequence[Mapping[str, Any]]) -> str | None:
    """Returns a message about the first fact in which ranks differ; None if they agree.

    Args:
        everyone: facts by name, of each rank; a list is compared position by position.
    """
    for field in dict.fromkeys(field for rank_facts in everyone for field in rank_facts):
        values = [rank_facts.get(field) for rank_facts in everyone]
        odd = [rank for rank, value in enumerate(values) if value != values[0]]
        if odd:
            return _difference(field, values, odd)
    return None


def _difference(field: str, values: Sequence[Any], odd: Sequence[int]) -> str:
    first, other = values[0], values[odd[0]]
    ranks = f"(ranks that differ from rank 0: {list(odd)})"
    if isinstance(first, list) and isinstance(other, list):
        for position in range(max(len(first), len(other))):
            value = first[position] if position < len(first) else "nothing"
            its_value = other[position] if position < len(other) else "nothing"
            if value != its_value:
                return (
                    f"{field} differ between ranks at position {position}: rank 0 has {value}, "
                    f"rank {odd[0]} has {its_value} {ranks}"
                )
    verb = "differ" if " and " in field else "differs"
    return (
        f"{field} {verb} between ranks: rank 0 has {first!r}, rank {odd[0]} has {other!r} {ranks}"
    )


def check_across_ranks(
    trained: Sequence[Trained], facts: Mapping[str, list[str]], group: dist.ProcessGroup
) -> None:
    """Raises on every rank if the ranks' parameters differ in number, shape, strides or dtype.

    Args:
        trained: the parameters.
        facts: further facts that have to be the same, by the names used in messages.

    Raises:
        MismatchError: names the first parameter, or the first fact, that differs.
    """
    forms: list[_Fact] = [
        (
            entry.name,
            tuple(entry.parameter.shape),
            entry.parameter.stride(),
            str(entry.parameter.dtype),
        )
        for entry in trained
    ]
    device = trained[0].parameter.device if trained else torch.device("cpu")
    numbers = [len(forms), _digest([fact[1:] for fact in forms]), _digest(facts)]
    # Three numbers first: names and shapes of a large model travel only where they differ.
    summary = torch.tensor(numbers, device=device)
    summaries = [torch.empty_like(summary) for _ in range(group.size())]
    dist.all_gather(summaries, summary, group=group)
    if all(
        torch.equal(rank_summary, summary) for rank_summary in summaries
    ):  # equal here on all ranks or on none
        return
    facts_of_ranks: list[Any] = [None] * group.size()
    with on_device_of(entry.parameter for entry in trained):
        dist.all_gather_object(facts_of_ranks, (forms, dict(facts)), group=group)
    _check_forms([rank_facts for rank_facts, _ in facts_of_ranks])
    text = first_difference([rank_facts for _, rank_facts in facts_of_ranks])
    if text is not None:
        raise MismatchError(
            f"DistributedDataParallel: {text}. Build the same model, with the same arguments, on "
            f"all ranks"
        )


def _check_forms(details: Sequence[list[_Fact]]) -> None:
    for rank, forms in enumerate(details):
        if len(forms) != len(details[0]):
            raise MismatchError(
                f"DDP expects same model across all ranks, but Rank 0 has {len(details[0])} "
                f"params, while rank {rank} has inconsistent {len(forms)} params. "
                f"{_first_parameter(details[0], forms, rank)}"
            )
    for rank, forms in enumerate(details):
        if [fact[1:] for fact in forms] != [fact[1:] for fact in details[0]]:
            raise MismatchError(
                f"DDP expects same model across all ranks: "
                f"{_first_parameter(details[0], forms, rank)}"
            )


def _first_parameter(reference: list[_Fact], forms: list[_Fact], rank: int) -> str:
    for position, (left, right) in enumerate(zip(reference, forms, strict=False)):
        if left[1:] != right[1:]:
            return (
                f"params[{position}] is {_describe(left)} on rank 0, "
                f"{_describe(right)} on rank {rank}"
            )
    longer, owner = (reference, 0) if len(reference) > len(forms) else (forms, rank)
    extra = longer[min(len(reference), len(forms))]
    return f"The first that only rank {owner} has is {_describe(extra)}"


def _describe(fact: _Fact) -> str:
    name, shape, stride, dtype = fact
    return f"{name!r} with sizes {list(shape)}, strides {list(stride)}, {dtype}"


def _digest(facts: object) -> int:
    text = repr(facts).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "little")
