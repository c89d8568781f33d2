"""Defines ``process_group``, which makes a process group with compressed sums and means.

It compresses where a program takes a process group and no hook: DistributedDataParallel without a
hook, ``replicate()`` and ``fully_shard`` of FSDP2 over a mesh of the group. All collectives but
all-reduce and reduce-scatter of floating-point tensors run on the backends of the wrapped group.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from commhooks._torch import COLLECTIVES, SCATTERING, base_of
from commhooks.collectives._calls import Handle
from commhooks.collectives._functions import Collectives
from commhooks.core._dense import Dense
from commhooks.core._scheme import Scheme, slots_of
from commhooks.core._settings import check_seed, check_value
from commhooks.errors import RegistrationError
from commhooks.hook._handshake import HANDSHAKE_LIMIT, handshake
from commhooks.hook._state import asks_for_scheme
from commhooks.hook._target import check_process_group
from commhooks.wrappers._make import describe, make_for_training
from ddp_core import group_timeout, make_with_timeout
from ddp_core._torch import add_backend, backend_of, device_types, dynamo_disable

__all__ = ["SchemeGroup", "process_group"]


_NAME = "commhooks"  # of the backend
_NO_BACKEND = SimpleNamespace(supports_splitting=False)

# Collectives that reduce a list of tensors at once.
_LIST_COLLECTIVES = (
    *("allreduce_coalesced", "reduce_scatter"),
    *("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"),
)

_OTHER_OPS = (dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT)
_FIXED_GROUP = (
    "it runs in a process group, whose ranks are fixed; make process_group(scheme, group) of the "
    "others, and wrap the module again over it"
)


def process_group(
    scheme: str | Scheme = "none",
    group: dist.ProcessGroup | None = None,
    *,
    least: int = 1024,
    seed: int = 0,
    **options: Any,
) -> SchemeGroup:
    """Makes a process group that averages by a scheme; all ranks of ``group`` call it.

    The scheme runs in all-reduce and reduce-scatter, all other collectives are those of ``group``.

    Args:
        scheme: a name or a scheme that keeps no memory.
        group: ranks and backends; the default group by default.
        least: smallest number of entries of a floating-point tensor that is compressed; smaller
            tensors, and integers, are sent uncompressed.
        seed: base of the scheme's random draws, the same on every rank.
        options: options of the scheme, see :func:`commhooks.make`.

    Raises:
        RegistrationError: there is no process group, ``group`` runs a scheme already, or the
            scheme keeps memory, which is kept by parameter name: a group has no names.
        MismatchError: the ranks differ in scheme, options or versions.

    Example:
        >>> group = commhooks.process_group("int8")
        >>> model = DistributedDataParallel(module, process_group=group)
    """
    check_process_group(group)
    wrapped = group or dist.group.WORLD
    if wrapped is None:
        raise RegistrationError(
            "process_group: no process group; call torch.distributed.init_process_group first"
        )
    if isinstance(wrapped, SchemeGroup):
        raise RegistrationError(
            f"process_group(scheme, group): {wrapped.hook} runs in it already; pass a group of "
            f"torch.distributed that runs no scheme (init_process_group or new_group)"
        )
    built = make_for_training(scheme, **options)
    _check_no_memory("process_group", built)
    least, seed = check_value("process_group", "least", least, int), check_seed(seed)
    facts = {"scheme and options": describe(built), "least": least, "seed": seed}
    handshake("commhooks.process_group", facts, wrapped, HANDSHAKE_LIMIT)
    _register_backend()
    ranks = dist.get_process_group_ranks(wrapped)
    unsorted: dict[str, Any] = {} if ranks == sorted(ranks) else {"sort_ranks": False}
    new_group = partial(
        dist.new_group,
        ranks,
        timeout=group_timeout(wrapped),
        backend=_NAME,
        pg_options=partial(SchemeGroup, wrapped, built, least, seed),
        # Without it, ranks outside of the group would have to call new_group, too.
        use_local_synchronization=len(ranks) != dist.get_world_size(),
        **unsorted,
    )
    made: SchemeGroup = make_with_timeout(wrapped, new_group)
    made.show_backends()
    return made


@cache
def _register_backend() -> None:
    """Registers the backend's name with torch, which makes groups by that name."""
    # Not when commhooks is imported: torch parses "cpu:gloo" and the like differently once any
    # further backend is registered.
    dist.Backend.register_backend(_NAME, _create, extended_api=True, devices=["cpu", "cuda"])


def _create(_: Any, make_group: Any) -> SchemeGroup:
    """Makes the group; called by torch.distributed with ``pg_options``."""
    if not isinstance(make_group, partial):
        raise RegistrationError(
            f"new_group(backend={_NAME!r}): a group of this backend wraps another one, which sends "
            f"the bytes; call commhooks.process_group(scheme, group)"
        )
    made: SchemeGroup = make_group()
    return made


def _check_no_memory(call: str, scheme: Scheme) -> None:
    """Raises RegistrationError if a scheme keeps memory by parameter name: a group has no names."""
    if slots_of(scheme):
        raise RegistrationError(
            f"{call}: {scheme} keeps state by parameter, and a process group knows no names; "
            f"commhooks.register(model, scheme) runs it on a model over a plain group, and "
            f"commhooks.Collectives(scheme) on tensors with names"
        )


class _UnnamedCollectives(Collectives):
    """Runs a process group's collectives, in which tensors are identified by size only."""

    @asks_for_scheme
    def switch(self, scheme: str | Scheme, **options: Any) -> None:
        """Runs another scheme, which may not keep memory, from the next call on."""
        built = make_for_training(scheme, **options)
        _check_no_memory("process_group(...).hook.switch", built)
        super().switch(built)


class SchemeGroup(dist.ProcessGroup):
    """Averages by a scheme; other collectives are those of the wrapped group.

    The scheme runs in ``all_reduce`` and ``reduce_scatter_tensor`` with ``ReduceOp.SUM`` or ``AVG``
    of one floating-point tensor of at least ``least`` entries. The group warns once for each other
    collective that averages floating-point tensors, since it sends them uncompressed.

    Args:
        wrapped: the wrapped group.
        scheme: the scheme, which may not keep memory.
        least: smallest number of entries of a tensor that is compressed.
        seed: base of random draws.

    Attributes:
        wrapped: the wrapped group.
        hook: runs the scheme, with ledger and reports, see :class:`commhooks.Collectives`.
    """

    _name = ""

    def __init__(self, wrapped: dist.ProcessGroup, scheme: Scheme, least: int, seed: int) -> None:
        super().__init__(wrapped.rank(), wrapped.size())  # type: ignore[call-arg]
        self.wrapped, self.least, self._shows_backends = wrapped, least, False
        kinds = dist.ProcessGroup.BackendType
        for device in device_types(wrapped):
            backend = backend_of(wrapped, device)
            # Collectives without a Python method below go straight to the backend, in C++.
            kind = getattr(kinds, backend.name().upper(), kinds.CUSTOM)
            add_backend(self, device, kind, backend)
        self.hook = _UnnamedCollectives(scheme, wrapped, seed=seed)
        self.hook.fixed_group_reason = _FIXED_GROUP
        self._warned_calls: set[str] = set()

    @property
    def _scheme(self) -> Scheme:
        return self.hook.scheme  # not stored: ``hook.switch`` changes it

    def shutdown(self) -> None:
        """Closes the hook; the wrapped group stays usable."""
        self.hook._close()

    # torch calls these on a group that it makes. The base class would pass name and description on
    # to the backends, which are those of the wrapped group, and so rename the wrapped group: a
    # DeviceMesh, which finds groups by name, would then use this group in its place.
    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        pass

    @property
    def group_name(self) -> str:  # type: ignore[override]
        """Returns the name by which torch.distributed knows the group."""
        return self._name

    def getBackendName(self) -> str:
        """Returns the name of the backend."""
        return _NAME

    def show_backends(self) -> None:
        """Lets ``_get_backend`` return backends, after torch.distributed has made the group."""
        self._shows_backends = True

    # torch connects the backends of a group that it makes, if the default group is bound to a
    # device: the wrapped group's backends would get a second communicator, and leak one.
    def _get_backend(self, device: torch.device) -> Any:
        return super()._get_backend(device) if self._shows_backends else _NO_BACKEND

    @dynamo_disable
    def allreduce(  # type: ignore[override]
        self, tensors: list[Tensor], opts: Any = None
    ) -> Any:
        """Reduces large floating-point tensors by the scheme, others by the wrapped group."""
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        fits = len(tensors) == 1 and _can_average(tensors[0], op)
        if not fits or tensors[0].numel() < self.least:
            return self.wrapped.allreduce(tensors, *([] if opts is None else [opts]))
        (tensor,) = tensors
        # Named by its size, which is equal on all ranks, with or without a backward pass (join).
        name = f"{tensor.numel()} entries of {tensor.dtype}"
        handle = self.hook.all_reduce(tensor, name, op=op, async_op=True)
        assert handle is not None
        future = handle.get_future().then(lambda done: [done.value()])
        return Handle(future, tensor.device)

    def _scatter(self, output: Tensor, input: Tensor, opts: Any) -> tuple[bool, Any]:
        """Runs a reduce-scatter by the scheme if it can; returns whether it did, and a handle."""
        if input.numel() < self.least:
            return False, None
        fits = _can_average(input, opts.reduceOp)
        if not (fits and self._scheme.traits.shards):
            self._warn("reduce_scatter_tensor", [input], opts.reduceOp)
            return False, None
        name, async_op = f"{input.numel()} entries of {input.dtype}", opts.asyncOp
        handle = self.hook.reduce_scatter(output, input, name, op=opts.reduceOp, async_op=async_op)
        if handle is None:
            return True, None
        # A list, as the future of a backend has.
        future = handle.get_future().then(lambda done: [done.value()])
        return True, Handle(future, output.device)

    def _warn(self, call: str, tensors: Sequence[Any], op: Any) -> None:
        # An entry may be a list: the parts of all ranks.
        flat = [tensor for given in tensors for tensor in ([given] if _is_tensor(given) else given)]
        numel = sum(tensor.numel() for tensor in flat if _is_real(tensor))
        averages = not any(op == other_op for other_op in _OTHER_OPS)
        is_quiet = type(self._scheme) is Dense or call in self._warned_calls
        if is_quiet or not averages or numel < self.least:
            return
        self._warned_calls.add(call)
        warnings.warn(
            f"{call} of {numel} entries in a process group of {self._scheme} is sent "
            f"uncompressed: such a group compresses all_reduce, and by schemes that reduce shards "
            f"reduce_scatter_tensor, of one floating-point tensor with SUM or AVG. For models of "
            f"FSDP, use commhooks.register(model, scheme) over a plain process group",
            RuntimeWarning,
            stacklevel=4,
        )


def _can_average(tensor: Tensor, op: Any) -> bool:
    """Whether ``op`` is a sum or a mean, and a scheme can take the tensor."""
    # ``op`` on the left: torch compares the two kinds of operations in this order only.
    mean = op == dist.ReduceOp.SUM or op == dist.ReduceOp.AVG
    return mean and tensor.layout == torch.strided and _is_real(tensor)


def _is_real(tensor: Tensor) -> bool:
    """Whether a tensor has real floating-point numbers, not complex ones as pairs.

    torch passes complex numbers to a group as ``torch.view_as_real``, whose last dimension has 2
    entries. The reducer flattens that view; then the tensor's base is complex. (A real tensor with
    2 columns looks the same in inference mode or in functional collectives, which have no base: it
    is sent uncompressed, too.)
    """
    base = base_of(tensor)
    pairs = tensor.shape[-1:] == (2,) or (base is not None and base.is_complex())
    return tensor.is_floating_point() and not pairs


def _is_tensor(given: Any) -> bool:
    return isinstance(given, Tensor)


def _forwarded(name: str) -> Any:
    # Reducers call collectives while torch.compile traces every Python function that runs.
    @dynamo_disable
    def method(self: SchemeGroup, *args: Any, **options: Any) -> Any:
        return getattr(self.wrapped, name)(*args, **options)

    return method


def _reduced_by_scheme(name: str) -> Any:
    @dynamo_disable
    def method(self: SchemeGroup, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        opts = dist.ReduceScatterOptions() if opts is None else opts
        done, handle = self._scatter(output, input, opts)
        return handle if done else getattr(self.wrapped, name)(output, input, opts)

    return method


def _forwarded_with_warning(name: str) -> Any:
    @dynamo_disable
    def method(self: SchemeGroup, *given: Any, **options: Any) -> Any:
        *tensors, opts = (*given, *options.values())
        if tensors and hasattr(opts, "reduceOp"):
            self._warn(name, tensors[-1], opts.reduceOp)
        return getattr(self.wrapped, name)(*given, **options)

    return method


# The last entry overrides some names of the first.
for _names, _made in (
    (COLLECTIVES, _forwarded),
    (SCATTERING, _reduced_by_scheme),
    (_LIST_COLLECTIVES, _forwarded_with_warning),
):
    for _name in _names:
        if hasattr(dist.ProcessGroup, _name):
            setattr(SchemeGroup, _name, _made(_name))
