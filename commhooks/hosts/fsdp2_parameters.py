"""Sends the parameters that FSDP2 gathers before forward and backward by a scheme.

The owner of a shard keeps and updates it in full precision; what all ranks compute with is rounded,
the same on every rank (Wang et al., ZeRO++, 2023: quantised weights; for their differences see
``fsdp2_differences.py``).
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from commhooks._torch import AllGather, DefaultAllGather, DefaultAllocMixin, fsdp2_gather
from commhooks.core.dense import Dense
from commhooks.core.scheme import Scheme, walk
from commhooks.errors import RegistrationError
from commhooks.hosts.collectives import Collectives
from commhooks.hosts.fsdp2_differences import DifferencesAllGather
from commhooks.hosts.fsdp2_gathered import GatheredParameters
from commhooks.hosts.fsdp2_model import FSDP2Model
from commhooks.hosts.fsdp2_packing import GatherPacked, Packing
from commhooks.kernels import FORMATS
from commhooks.schemes._differences import codec_of_differences
from commhooks.schemes.casts import TwoPhaseCast
from commhooks.schemes.quantized import Blockwise
from commhooks.wrappers.cast import Cast
from commhooks.wrappers.make import make

__all__ = ["gather_parameters"]

_FEWEST_BITS = 4


class SchemeAllGather(DefaultAllocMixin, AllGather):
    """Gathers the parameters of one FSDP2 module.

    Args:
        collectives: run the gathers.
        group: FSDP2's group of the module's parameters.
    """

    def __init__(self, collectives: Collectives, group: Any) -> None:
        self._collectives, self._packing = collectives, Packing.of(group)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Any:
        if group.size() != self._collectives.world_size:
            # What the forward pass has left on a part of the ranks (reshard_after_forward=8), which
            # was rounded when it was gathered.
            return DefaultAllGather()(output_tensor, input_tensor, group, async_op)
        call = GatherPacked("all_gather", input_tensor, output_tensor, packing=self._packing)
        return self._collectives.run(call, None, async_op)


def gather_parameters(
    model: nn.Module, scheme: str | Scheme = "int8", *, differences: bool = False, seed: int = 0
) -> GatheredParameters:
    """Makes FSDP2 gather parameters by a scheme; all ranks call it, after the last ``fully_shard``.

    Args:
        model: a model of FSDP2.
        scheme: a name, which rounds to nearest here (not "int4", whose rotation is random), or a
            scheme of 4 bits or more that keeps no memory and rounds equal values equally: forward
            and backward have to compute with the same weights. With ``differences``: any that packs
            blocks, "int4" among them.
        differences: sends what has changed since the last gather, and nothing in backward. The next
            difference makes up for what rounding leaves of one: errors do not add up, and are a
            share of the last step. Every rank keeps all parameters, in the dtype of the gather.
        seed: base of random draws, the same on every rank.

    Returns:
        The collectives that gather, with ledger and reports. After ``close()`` FSDP2 gathers by
        itself; ``begin_anew()`` is for differences, once other parameters were written.

    Raises:
        RegistrationError: the scheme keeps memory, draws random bits, drops entries or sends fewer
            than 4 bits of each, or packs no differences, or the model is not one of FSDP2, or
            gathers in another way already.

    Example:
        >>> gathered = commhooks.hosts.gather_parameters(model)
    """
    allowed = _codec if differences else _same_each_time
    built = allowed(scheme)
    if differences and type(built) is Dense:
        raise RegistrationError(
            "gather_parameters(differences=True): none rounds nothing, so there is nothing to make "
            "up for; take int8 or int4, or leave differences out (fully_shard("
            "reshard_after_forward=False) saves the gather of backward)"
        )
    found = FSDP2Model.of(model, "gather_parameters")
    groups = [module.group for module in found.modules]
    taken = [fsdp2_gather(group) for group in groups]
    if any(type(one) is not DefaultAllGather for one in taken):
        raise RegistrationError(
            f"gather_parameters: FSDP2 gathers by {type(taken[0]).__name__} already "
            f"(gather_parameters, set_custom_all_gather, set_symm_mem_for_comm or "
            f"set_allocate_memory_from_process_group_for_comm), in whose place the scheme would be"
        )
    # Not those of the reduce-scatter, which may have a group of its own.
    ranks = groups[0].mesh_info.shard_process_group
    collectives = GatheredParameters(built, ranks, seed=seed, allowed=allowed)
    gather = DifferencesAllGather if differences else SchemeAllGather
    collectives.install(groups, lambda group: gather(collectives, group))
    return collectives


def _codec(scheme: str | Scheme) -> Scheme:
    """Returns what packs differences, or the scheme "none"."""
    return codec_of_differences(scheme, "gather_parameters(differences=True)") or Dense()


def _same_each_time(scheme: str | Scheme) -> Scheme:
    """Returns a scheme that rounds equal values equally, without feedback."""
    built = _to_nearest(scheme) if isinstance(scheme, str) else make(scheme)
    inside = list(walk(built))
    random = any(getattr(one, name, False) for one in inside for name in ("stochastic", "rotate"))
    if random or not all(
        isinstance(one, Dense | Cast | TwoPhaseCast | Blockwise) for one in inside
    ):
        raise RegistrationError(
            f"gather_parameters: {built} keeps memory, draws random bits or drops entries, so that "
            f"forward and backward would have different weights; take a name such as none, bf16, "
            f"int8 or fp8, or blocks that are rounded to nearest without rotation, such as "
            f'make("int8", rounding="nearest", error_feedback=False), or differences=True, which '
            f"takes int4 and makes up for what rounding leaves"
        )
    for one in inside:
        if isinstance(one, Blockwise) and FORMATS[one.format].bits < _FEWEST_BITS:
            raise RegistrationError(
                f"gather_parameters: {built} sends fewer than {_FEWEST_BITS} bits of an entry, too "
                f"few for a model to compute with; take none, bf16, fp16, int8, fp8 or mxfp8, or "
                f"differences=True, which makes up for what rounding leaves"
            )
    return built


def _to_nearest(name: str) -> Scheme:
    """Returns the scheme of a name, without feedback or random rounding."""
    built = make(name, error_feedback=False)
    return built.to_nearest() if isinstance(built, Blockwise) else built
