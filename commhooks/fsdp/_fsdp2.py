"""Runs schemes in FSDP2 (``torch.distributed.fsdp.fully_shard``).

FSDP2 hands over the gradients of a module, one piece of every parameter for each rank, and needs
the mean of this rank's pieces only. A scheme then runs the first of its two phases: the gradient is
rounded once and not twice, and half of the bytes travel. Between nodes (HSDP) the pieces of a rank
are averaged with those of the same rank on other nodes, by any scheme.

One bucket, step by step: ``register_on_fsdp2`` puts a :class:`SchemeReduceScatter` on each module's
group of parameters. In backward FSDP2 calls it with the flat gradient (``input_tensor``). It looks
up which pieces lie there (:meth:`FSDP2Module.layout`), makes a ``HookBucket`` of them, and
``average`` starts the hook's exchange, waits for it, and leaves the mean of this rank's shard in
``output_tensor``. The exchange is ``Engine.exchange``, which runs the scheme; with tensor
parallelism ``ExactParameters`` cuts the bucket in two before, and averages exactly what is not cut
between those ranks. Divisions by FSDP2, before or after, are undone last.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from pkgutil import resolve_name
from typing import Any, ClassVar, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from commhooks._torch import (
    ALL_REDUCE,
    REDUCE_SCATTER,
    DDPMeshInfo,
    DefaultAllocMixin,
    DefaultReduceScatter,
    FSDPMeshInfo,
    ReduceScatter,
    divide_factors,
    dtensor_spec_before,
    fsdp2_groups,
    fsdp2_is_in_backward,
    fsdp2_module_name,
    fsdp2_ranks,
    fsdp2_state,
    owner_of,
    size_before,
)
from commhooks.checkpoint._placement import shard_spec_of
from commhooks.core._layout import Layout, equal_shards
from commhooks.core._names import piece_name, plain_names
from commhooks.core._scheme import Scheme
from commhooks.core._settings import check_seed
from commhooks.core._slot import number_of
from commhooks.core._user_line import user_stacklevel
from commhooks.errors import HookNotAttachedError, RegistrationError
from commhooks.fsdp._configure import configure_sharded_hook
from commhooks.hook._attachment import HostGuard
from commhooks.hook._exchanges import HookBucket
from commhooks.hook._handshake import HANDSHAKE_LIMIT
from commhooks.hook._sharded import (
    OwnShards,
    ShardedParameter,
    ShardedParameters,
)
from commhooks.hook._state import HookState
from commhooks.verify import Verification
from commhooks.wrappers._make import describe
from ddp_core.exchange._errors import listed

__all__ = [
    "FSDP2Model",
    "FSDP2Module",
    "FSDPCommHook",
    "ReplicaAllReduce",
    "SchemeReduceScatter",
    "check_free",
    "check_replicate_group",
    "groups_of",
    "parameter_of",
    "register_on_fsdp2",
    "replica_ranks",
    "shard_ranks",
    "warn_of_others",
]


# ---- a module of FSDP2, and the model


class FSDP2Module:
    """Describes one FSDP2 module: its number, and the parameters whose gradients it reduces.

    Args:
        number: the same on all ranks.
        group: FSDP2's group of parameters.
        names: names of the parameters within the model, by identity of FSDP2's objects.
    """

    def __init__(self, number: int, group: Any, names: dict[int, str]) -> None:
        self.number, self.group, self._names = number, group, names

    def layout(self, known: ShardedParameters, numel: int, pieces: int) -> Layout:
        """Returns the layout of a bucket of ``numel`` entries.

        Args:
            known: parameters of all modules.
            numel: number of entries, by which missing gradients are noticed.
            pieces: number of pieces of each parameter in the bucket.
        """
        trained = [
            parameter
            for parameter in self.group.fsdp_params
            if parameter.sharded_param.requires_grad
        ]
        total = sum(parameter.padded_sharded_param_size.numel() for parameter in trained) * pieces
        if total != numel:
            raise RegistrationError(
                f"commhooks: FSDP2 reduces {numel} entries of module "
                f"{fsdp2_module_name(self.group) or 'root'}, whose trained parameters have "
                f"{total}: some got no gradient in this step. Call "
                f"model.set_reduce_scatter_unused_params(True), so that zeros take their place; "
                f"where this torch has no such method, add 0 * parameter.sum() to the loss"
            )
        return known.layout_of([self._names[id(parameter)] for parameter in trained])

    def values(self) -> dict[str, Tensor]:
        """Returns this rank's shards of the parameters, by the names of the parameters."""
        return {
            self._names[id(parameter)]: parameter.sharded_param
            for parameter in self.group.fsdp_params
        }

    def predivide_factor(self, gradient: Tensor) -> float:
        """Returns the factor by which FSDP2 has divided a gradient before its reduce-scatter.

        1 in dtypes with the range of float32; float16 is divided before the sum.
        """
        before, *_ = self._dividers(gradient)
        return float(before or 1)

    def gradient_scale(self, reduced: Tensor) -> float:
        """Returns what FSDP2 has multiplied this node's mean by when its all-reduce hook runs."""
        ranks = fsdp2_ranks(self.group).size()
        given = self.group.gradient_divide_factor
        before, _, op, _ = self._dividers(reduced)
        if ranks == 1:  # no reduce-scatter: it divides by what was asked for at once
            return 1.0 / ((before or 1.0) * (given or 1.0))
        if op == dist.ReduceOp.AVG:
            return 1.0
        return float(ranks / ((before or 1.0) if op == dist.ReduceOp.SUM else given))

    def _dividers(self, gradient: Tensor) -> Any:
        group, mesh = self.group, self.group.mesh_info
        return divide_factors(
            fsdp2_ranks(group),
            mesh.replicate_process_group if isinstance(mesh, DDPMeshInfo) else None,
            gradient.dtype,
            gradient.device.type,
            group.gradient_divide_factor,
            getattr(group, "force_sum_reduction_for_comms", False),
        )


class FSDP2Model(NamedTuple):
    """Describes a model that was sharded by FSDP2.

    Attributes:
        modules: modules that reduce gradients, in the order of ``named_modules``.
        parameters: parameters of all these modules.
        ranks: the ranks that FSDP2 shards and reduces over.
    """

    modules: list[FSDP2Module]
    parameters: list[ShardedParameter]
    ranks: dist.ProcessGroup

    @classmethod
    def of(cls, model: nn.Module, call: str = "register") -> FSDP2Model:
        """Describes a model; raises RegistrationError unless all modules have the same ranks.

        Args:
            call: the public call, for the messages.
        """
        groups = list(groups_of(model, call).values())
        if not groups:
            raise RegistrationError(
                f"{call}: {type(model).__name__} has no FSDP2 module with parameters; shard it "
                f"before, fully_shard(model)"
            )
        if any(not isinstance(group.mesh_info, FSDPMeshInfo) for group in groups):
            raise RegistrationError(
                f"{call}: a model of replicate() on FSDP2 gathers nothing, and averages its "
                f"gradients by an all-reduce that takes no scheme; commhooks.fsdp.replicate("
                f"model, scheme) does the same with a scheme"
            )
        ranks = fsdp2_ranks(groups[0])
        if any(fsdp2_ranks(group) is not ranks for group in groups):
            raise RegistrationError(
                f"{call}: the FSDP2 modules of this model are sharded over different ranks; take "
                f"each of them separately"
            )
        by_id = {id(value): name for name, value in model.named_parameters()}
        plain = plain_names(by_id.values())
        pairs = [(parameter, group) for group in groups for parameter in group.fsdp_params]
        sharded = {id(parameter): id(parameter_of(parameter)) for parameter, _ in pairs}
        names = {parameter: plain[by_id[original]] for parameter, original in sharded.items()}
        parameters = [
            _sharded(parameter, names[id(parameter)], group) for parameter, group in pairs
        ]
        modules = [FSDP2Module(number, group, names) for number, group in enumerate(groups)]
        return cls(modules, parameters, ranks)


def groups_of(model: nn.Module, call: str = "register") -> dict[str, Any]:
    """Returns FSDP2's groups of parameters, by the name of the (first) module that has each."""
    by_module: dict[str, Any] = {}
    for name, module in model.named_modules():
        groups = fsdp2_groups(module) if isinstance(module, FSDPModule) else []
        if len(groups) > 1:
            raise RegistrationError(
                f"{call}: the parameters of the FSDP2 module {name or 'root'} are on several "
                f"meshes (shard_placement_fn), and it takes no reduction from outside"
            )
        # Modules that were sharded together, fully_shard([a, b]), have one.
        if groups and groups[0] not in by_module.values():
            by_module[name] = groups[0]
    return by_module


def parameter_of(sharded: Any) -> nn.Parameter:
    """Returns the parameter that a module has now, given FSDP2's object for it.

    The parameter may have been replaced since ``fully_shard``; FSDP2 looks it up again in the first
    forward pass.
    """
    owner = owner_of(sharded)
    parameter: nn.Parameter = getattr(owner.module, owner.param_name)
    return parameter


def _sharded(parameter: Any, name: str, group: Any) -> ShardedParameter:
    policy = group.mp_policy
    dtype = policy.reduce_dtype or policy.param_dtype or parameter.sharded_param.dtype
    trained = parameter.sharded_param.requires_grad
    cut = shard_spec_of(dtensor_spec_before(parameter))
    return ShardedParameter(
        name, size_before(parameter), dtype, parameter.fsdp_placement.dim, trained, cut
    )


# ---- what FSDP2 calls


class FSDPCommHook:
    """Runs a hook in place of the reduce-scatter or all-reduce of an FSDP2 module.

    Args:
        hook: the hook that runs.
        module: the module whose gradients it averages.
        known: the parameters of all modules.

    Attributes:
        attribute: name of the attribute of FSDP2's parameter groups that holds the collective.
    """

    attribute: ClassVar[str]

    def __init__(self, hook: HookState, module: FSDP2Module, known: ShardedParameters) -> None:
        self.hook, self._module, self._known = hook, module, known

    @classmethod
    def hook_of(cls, group: Any) -> HookState | None:
        """Returns the hook that a parameter group has in ``attribute``; None if it has no hook."""
        present = getattr(group, cls.attribute)
        return present.hook if isinstance(present, cls) else None


class SchemeReduceScatter(FSDPCommHook, DefaultAllocMixin, ReduceScatter):
    """Reduces and scatters the gradients of one FSDP2 module by a hook's scheme."""

    attribute = REDUCE_SCATTER

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        # ``async_op`` is False: FSDP2 reads ``output_tensor`` in stream order.
        numel, ranks = input_tensor.numel(), group.size()
        bucket = HookBucket(
            self._module.number,
            input_tensor,
            self._module.layout(self._known, numel, ranks),
            shards=equal_shards(numel, ranks),
            output=output_tensor,
            is_blocking=True,
            dense_sends=1.0,
        )
        before = 1.0
        if op == dist.ReduceOp.SUM and _needs_unscaled(self.hook):
            before = self._module.predivide_factor(input_tensor)
        if before != 1:
            input_tensor.mul_(before)
        self.hook.start(bucket).wait()
        if op == dist.ReduceOp.AVG:
            return
        # A sum, which FSDP2 divides afterwards; or a sum of products with its divide factor.
        factor = before if op == dist.ReduceOp.SUM else self._module.group.gradient_divide_factor
        output_tensor.mul_(ranks / factor)


class ReplicaAllReduce(FSDPCommHook):
    """Averages the reduced gradients of one FSDP2 module over replicas by a hook's scheme."""

    attribute = ALL_REDUCE

    def __call__(self, reduced: Tensor) -> None:
        # FSDP2 gives this memory back to the stream of the reduce-scatter, which does not wait for
        # the present one; the future's ``wait`` below records the present stream on it.
        layout = self._module.layout(self._known, reduced.numel(), 1)
        units = self._module.gradient_scale(reduced) if _needs_unscaled(self.hook) else 1.0
        if units != 1:
            reduced.div_(units)
        self.hook.start(HookBucket(self._module.number, reduced, layout, is_blocking=True)).wait()
        if self._module.group.gradient_divide_factor is not None:
            # FSDP2 has divided by this factor, which includes the number of replicas.
            units *= self.hook.world_size
        if units != 1:
            reduced.mul_(units)


def _needs_unscaled(hook: HookState) -> bool:
    """Whether the scheme needs unscaled gradients, since it keeps memory in their units."""
    return hook.engine.keeps_memory


# ---- what is refused


_OWN = (
    "FSDP2 averages over the replicas itself, since the model was sharded with a mesh of two "
    "dimensions; shard it over the ranks of a node only: "
    'fully_shard(module, mesh=mesh["shard"]), then '
    'register(model, scheme, replicate_group=mesh["replicate"])'
)


def warn_of_others(model: nn.Module, fsdp2_model: FSDP2Model) -> None:
    """Warns if a model trains parameters that no FSDP2 module has."""
    modules = [module.group.fsdp_params for module in fsdp2_model.modules]
    sharded = {id(parameter_of(parameter)) for some in modules for parameter in some}
    trained = {
        name: id(parameter)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    unsharded = [name for name, identity in trained.items() if identity not in sharded]
    if unsharded:
        warnings.warn(
            f"register: {listed(unsharded)}: in no FSDP2 module, so nothing averages their "
            f"gradients, and ranks drift apart. Call fully_shard(model) before register; average "
            f"parameters that you left out on purpose (ignored_params)",
            RuntimeWarning,
            stacklevel=user_stacklevel(),
        )


def check_free(fsdp2_model: FSDP2Model, kind: type[FSDPCommHook]) -> None:
    """Raises if a module has a hook or another reduction in the place of the new hook."""
    for module in fsdp2_model.modules:
        present, hook = getattr(module.group, kind.attribute), kind.hook_of(module.group)
        if hook is not None:
            raise RegistrationError(
                f"register: this model already has the hook {hook}; change its scheme with "
                f"hook.switch(...)"
            )
        if present is not None and type(present) is not DefaultReduceScatter:
            raise RegistrationError(
                f"register: FSDP2 reduces by {present} already (set_custom_reduce_scatter, "
                f"set_all_reduce_hook, set_allocate_memory_from_process_group_for_comm or "
                f"set_symm_mem_for_comm), in whose place the scheme would be; leave that call out"
            )


def check_replicate_group(replicate_group: object) -> None:
    """Raises unless ``replicate_group`` is a process group, a mesh of one dimension or None."""
    is_mesh = isinstance(replicate_group, DeviceMesh) and replicate_group.ndim == 1
    if not (replicate_group is None or is_mesh or isinstance(replicate_group, dist.ProcessGroup)):
        raise RegistrationError(
            f"register(replicate_group=...): a process group or a mesh of one dimension, such as "
            f'mesh["replicate"], got {replicate_group!r}'
        )


def shard_ranks(fsdp2_model: FSDP2Model) -> dist.ProcessGroup:
    """Returns the ranks over which FSDP2 reduces; raises if there is only one."""
    if fsdp2_model.ranks.size() > 1:
        return fsdp2_model.ranks
    if _averages_itself(fsdp2_model):
        raise RegistrationError(f"register: the model is sharded over one rank, and {_OWN}")
    raise RegistrationError(
        "register: the model is sharded over one rank, so FSDP2 reduces nothing; to average "
        'between replicas: register(model, scheme, replicate_group=mesh["replicate"])'
    )


def replica_ranks(
    fsdp2_model: FSDP2Model, replicate_group: DeviceMesh | dist.ProcessGroup
) -> dist.ProcessGroup:
    """Returns the replicas to average over; raises if FSDP2 averages over replicas itself."""
    if _averages_itself(fsdp2_model):
        raise RegistrationError(f"register(replicate_group=...): {_OWN}")
    shards = set(dist.get_process_group_ranks(fsdp2_model.ranks))
    if isinstance(replicate_group, DeviceMesh):
        replicate_group = replicate_group.get_group()
    same = set(dist.get_process_group_ranks(replicate_group)) & shards
    if len(same) > 1:
        raise RegistrationError(
            f"register(replicate_group=...): ranks {sorted(same)} hold different shards of one "
            f"replica, so a mean over them would mix gradients of different parameters; pass the "
            f'mesh or group of ranks that hold the same shard, such as mesh["replicate"]'
        )
    return replicate_group


def _averages_itself(fsdp2_model: FSDP2Model) -> bool:
    return any(isinstance(module.group.mesh_info, DDPMeshInfo) for module in fsdp2_model.modules)


# ---- registration


def register_on_fsdp2(
    model: nn.Module,
    scheme: str | Scheme,
    *,
    replicate_group: DeviceMesh | dist.ProcessGroup | None = None,
    seed: int = 0,
    history: int = 100_000,
    verification: Verification | None = None,
    **options: Any,
) -> HookState:
    """Registers a scheme on all FSDP2 modules of a model; see :func:`commhooks.register`.

    Args:
        replicate_group: replicas to average over after FSDP2 has reduced over its own ranks;
            None: the scheme replaces FSDP2's reduce-scatter.
        verification: compares steps with the dense mean; None: no step.

    Raises:
        RegistrationError: the model or the scheme is not supported.
        MismatchError: the ranks differ.
    """
    # Refuse models that cannot take the hook.
    check_replicate_group(replicate_group)
    fsdp2_model = FSDP2Model.of(model)
    warn_of_others(model, fsdp2_model)
    kinds: list[type[FSDPCommHook]] = [SchemeReduceScatter, ReplicaAllReduce]
    kind, other_kind = kinds if replicate_group is None else reversed(kinds)
    check_free(fsdp2_model, kind)
    group = (
        shard_ranks(fsdp2_model)
        if replicate_group is None
        else replica_ranks(fsdp2_model, replicate_group)
    )

    # Make the hook, with the parameters as they lie in FSDP2's buckets.
    if replicate_group is not None and fsdp2_model.ranks.size() > 1:
        # A hook of the shards may have the same seed, and its draws are in what is averaged here: a
        # dither has to be independent of its input.
        seed = number_of(f"{check_seed(seed)}/between") >> 1
    made = _maker(scheme, shards=replicate_group is None)
    hook = made(process_group=group, seed=seed, history=history, **options)
    shards = fsdp2_model.ranks
    known = ShardedParameters(fsdp2_model.parameters, shards.size())
    if replicate_group is not None and shards.size() > 1:
        known = OwnShards(fsdp2_model.parameters, shards.size(), shards.rank())
        hook.target.shards = shards
    device = fsdp2_model.modules[0].group.device
    shards_for = "FSDP2" if replicate_group is None else ""
    values: Callable[[], Mapping[str, Tensor]] = dict  # no two ranks have the same shard
    if replicate_group is not None:
        rank = shards.rank() if shards.size() > 1 else None
        values = partial(_own_shards, list(map(weakref.ref, fsdp2_model.modules)), rank)
    configure_sharded_hook(
        hook,
        model,
        known,
        group,
        device,
        shards_for=shards_for,
        verification=verification,
        values=values,
    )

    # Compare settings with the other ranks, and chain the hooks within and between nodes.
    other_hook = other_kind.hook_of(fsdp2_model.modules[0].group)
    hook.target.verdict_groups = (
        _other_nodes(fsdp2_model, other_hook)
        if replicate_group is None
        else _other_shards(fsdp2_model)
    )
    facts = {
        "host": f"FSDP2 {kind.attribute}",
        "other place": None if other_hook is None else describe(other_hook.scheme),
    }
    hook.agree("commhooks.register", facts, HANDSHAKE_LIMIT)
    if other_hook is not None:
        inside, outside = (hook, other_hook) if replicate_group is None else (other_hook, hook)
        inside.target.verdict_groups[:] = _other_nodes(fsdp2_model, outside)
        inside.runner.chain_to(outside.runner)

    # Attach it.
    for module in fsdp2_model.modules:
        setattr(module.group, kind.attribute, kind(hook, module, known))
    model.register_forward_pre_hook(_guard(model, hook, kind))
    return hook


def _own_shards(modules: list[weakref.ref[FSDP2Module]], rank: int | None) -> dict[str, Tensor]:
    """Returns this rank's shards of all parameters, by name.

    Args:
        rank: rank among the ranks of the shards; None: parameters are not sharded.
    """
    # Held weakly: the modules hold the hook.
    shards: dict[str, Tensor] = {}
    for reference in modules:
        module = reference()
        shards |= {} if module is None else module.values()
    return (
        shards
        if rank is None
        else {piece_name(name, rank): shard for name, shard in shards.items()}
    )


def _guard(model: nn.Module, hook: HookState, kind: type[FSDPCommHook]) -> HostGuard:
    """Returns a guard that checks before each forward pass that all modules have the hook."""

    def has_hook(group: Any) -> bool:
        return kind.hook_of(group) is hook

    # Looked up once: a model may have thousands of modules.
    states = [fsdp2_state(module) for module in model.modules() if isinstance(module, FSDPModule)]
    check_ready = partial(_check_ready, states)
    return HostGuard(model, hook, groups_of(model), groups_of, has_hook, check_ready, _held)


def _held(model: nn.Module) -> list[Tensor]:
    """Returns the shards of a model, also while whole parameters take their place."""
    groups = groups_of(model).values()
    return [parameter.sharded_param for group in groups for parameter in group.fsdp_params]


def _check_ready(states: list[Any]) -> None:
    """Raises if the last backward pass raised, so that FSDP2 takes the next pass for a part of it.

    FSDP2 would compute with parameters gathered before, and leave gradients unreduced.
    """
    if any(fsdp2_is_in_backward(state) for state in states):
        raise HookNotAttachedError(
            "commhooks: the last backward pass has raised, and FSDP2 is still in it: the gradients "
            "of the next one would be wrong. Call reset_iter_state() of the root FSDP2 module and "
            "zero_grad() on all ranks after such a pass; where this torch has no reset_iter_state, "
            "resume from a checkpoint"
        )


def _maker(scheme: str | Scheme, *, shards: bool) -> Callable[..., HookState]:
    """Returns the constructor of the hook.

    Args:
        shards: whether the hook runs as FSDP2's reduce-scatter.
    """
    if scheme == "auto":
        # By its name: it is a hook, so that its module is above this one.
        kind: Any = resolve_name("commhooks.auto:AutoHook")
        return partial(kind, shards_for="FSDP2" if shards else "")
    return partial(HookState, scheme)


# A loss scaler skips a step on all ranks, so a hook agrees also with ranks that have other parts of
# what it averages: one between nodes with the other shards, one within a node with the other nodes.


def _other_shards(fsdp2_model: FSDP2Model) -> list[dist.ProcessGroup]:
    """Returns the verdict groups of a hook between nodes: the ranks of the other shards."""
    return _of_several(fsdp2_model.ranks)


def _other_nodes(fsdp2_model: FSDP2Model, between: HookState | None) -> list[dist.ProcessGroup]:
    """Returns the verdict groups of a hook within nodes: the ranks of the other nodes.

    Args:
        between: the hook between nodes; None: FSDP2 averages between them, if there are several.
    """
    if between is not None:
        return _of_several(between.target.group())
    infos = [module.group.mesh_info for module in fsdp2_model.modules]
    native = [info.replicate_process_group for info in infos if isinstance(info, DDPMeshInfo)]
    return _of_several(*native[:1])


def _of_several(*groups: dist.ProcessGroup) -> list[dist.ProcessGroup]:
    return [group for group in groups if group.size() > 1]
