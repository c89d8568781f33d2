"""Runs a scheme as the reduce-scatter of FSDP2 (``torch.distributed.fsdp.fully_shard``).

FSDP2 hands over the gradients of a module, one piece of every parameter for each rank, and needs
the mean of this rank's pieces only. A scheme then runs the first of its two phases: the gradient is
rounded once and not twice, and half of the bytes travel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from commhooks.checkpoint.names import plain_names
from commhooks.core.scheme import Scheme
from commhooks.core.shards import equal_shards
from commhooks.errors import HookNotAttachedError, RegistrationError
from commhooks.hook.handshake import MEETING
from commhooks.hook.sharded_bucket import ShardedBucket
from commhooks.hook.sharded_parameters import Sharded, ShardedParameters
from commhooks.hook.state import HookState

__all__ = ["register_sharded"]


class SchemeReduceScatter(ReduceScatter):
    """Reduces and scatters the gradients of one FSDP2 module by a hook's scheme."""

    def __init__(
        self, hook: HookState, number: int, group: Any, names: dict[int, str], known: Any
    ) -> None:
        self._hook, self._number, self._group = hook, number, group
        self._names, self._parameters = names, known

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        shards = equal_shards(input_tensor.numel(), group.size())
        layout = self._parameters.layout_of(self._present(input_tensor.numel(), group.size()))
        bucket = ShardedBucket(self._number, input_tensor, layout, shards, output_tensor)
        mean: Tensor = self._hook.start(bucket).wait()
        if mean.data_ptr() != output_tensor.data_ptr():
            output_tensor.copy_(mean)
        if op == dist.ReduceOp.AVG:
            return
        # A sum, which FSDP2 divides itself; or, with a divide factor, a sum of multiples.
        factor = 1.0 if op == dist.ReduceOp.SUM else self._group.gradient_divide_factor
        output_tensor.mul_(group.size() / factor)

    def _present(self, numel: int, world_size: int) -> list[str]:
        """Returns the names of the parameters in a bucket of ``numel`` entries."""
        trained = [one for one in self._group.fsdp_params if one.sharded_param.requires_grad]
        sizes = [one.padded_sharded_param_size.numel() * world_size for one in trained]
        if sum(sizes) == numel:
            return [self._names[id(one)] for one in trained]
        raise RegistrationError(
            f"commhooks: FSDP2 reduces {numel} entries of a module whose trained parameters have "
            f"{sum(sizes)}: some got no gradient in this step. Call "
            f"model.set_reduce_scatter_unused_params(True), so that zeros stand for them"
        )


class _Guard:
    """Tells the hook when a forward pass begins, and that its reduce-scatter is still installed."""

    def __init__(self, hook: HookState, installed: dict[Any, SchemeReduceScatter]) -> None:
        self._hook, self._installed = hook, installed

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        if not torch.is_grad_enabled():
            return
        for group, comm in self._installed.items():
            if group._reduce_scatter_comm is not comm:
                raise HookNotAttachedError(
                    f"commhooks: FSDP2 module {group._module_fqn or 'root'} has another "
                    f"reduce-scatter than the one that register installed "
                    f"({type(group._reduce_scatter_comm).__name__}), so {self._hook} would not run"
                )
        self._hook.forward_begins()


def register_sharded(
    model: nn.Module,
    scheme: str | Scheme,
    *,
    process_group: dist.ProcessGroup | None = None,
    seed: int = 0,
    history: int = 100_000,
    **options: Any,
) -> HookState:
    """Registers a scheme on all FSDP2 modules of a model; see :func:`commhooks.register`."""
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    groups = [group for one in modules for group in one._get_fsdp_state()._fsdp_param_groups]
    if not groups:
        raise RegistrationError("register: no FSDP2 module of this model has parameters")
    for one in modules:
        if len(one._get_fsdp_state()._fsdp_param_groups) > 1:
            raise RegistrationError(
                "register: an FSDP2 module whose parameters are on several meshes "
                "(shard_placement_fn) takes no reduce-scatter from outside"
            )
        if getattr(one, "_commhooks", None) is not None:
            raise RegistrationError(
                f"register: this model already has the hook {one._commhooks}; change its scheme "
                f"with hook.switch(...)"
            )
    shard_group = process_group or _shard_group(groups)
    hook = HookState(scheme, process_group=shard_group, seed=seed, history=history, **options)
    need_shards(hook.scheme)
    names = _names(model, groups)
    known = ShardedParameters(
        [_sharded(one, names[id(one)], group) for group in groups for one in group.fsdp_params],
        shard_group.size(),
    )
    hook._binding.adopt_sharded(model, known, shard_group)
    hook._attendance.watch(hook, model)
    hook.agree("commhooks.register", {"host": "FSDP2"}, MEETING)
    installed = {}
    for number, group in enumerate(groups):
        installed[group] = SchemeReduceScatter(hook, number, group, names, known)
        group._reduce_scatter_comm = installed[group]
    for one in modules:
        one._commhooks = hook
    model.register_forward_pre_hook(_Guard(hook, installed))
    return hook


def need_shards(scheme: Scheme) -> None:
    """Raises RegistrationError unless a scheme can return one shard of the mean alone."""
    if scheme.traits.shards:
        return
    raise RegistrationError(
        f"register: {scheme} averages whole buckets, and FSDP2 needs one shard of each on each "
        f"rank: it would send and keep what no rank needs. Schemes that exchange blocks of entries "
        f"run here: none, fp16, bf16, int8, int4, fp8, mxfp8, onebit, eden, and a codec in "
        f"commhooks.wrappers.TwoPhase(...), with or without error feedback. Between nodes (HSDP) "
        f"any scheme runs"
    )


def _shard_group(groups: Sequence[Any]) -> dist.ProcessGroup:
    found: list[dist.ProcessGroup] = [group._reduce_scatter_process_group for group in groups]
    if any(one is not found[0] for one in found):
        raise RegistrationError(
            "register: the FSDP2 modules of this model are sharded over different ranks; register "
            "each of them by itself"
        )
    return found[0]


def _names(model: nn.Module, groups: Sequence[Any]) -> dict[int, str]:
    """Returns the names of FSDP2's parameter objects, by identity."""
    by_id = {id(value): name for name, value in model.named_parameters()}
    plain = plain_names(by_id.values())
    ours = [one for group in groups for one in group.fsdp_params]
    return {id(one): plain[by_id[id(one.sharded_param)]] for one in ours}


def _sharded(parameter: Any, name: str, group: Any) -> Sharded:
    dtype = group.mp_policy.reduce_dtype or group.mp_policy.param_dtype
    shape, dim = parameter._orig_size, parameter.fsdp_placement.dim
    return Sharded(name, shape, dtype or parameter.sharded_param.dtype, dim)
