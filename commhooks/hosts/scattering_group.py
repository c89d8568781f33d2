"""Defines ``ScatteringGroup``, a process group whose reduce-scatter runs a scheme.

``fully_shard`` and FullyShardedDataParallel reduce gradients by it.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from commhooks._torch import SCATTERING
from commhooks.core.dense import Dense
from commhooks.core.scheme import Scheme, slots_of
from commhooks.errors import RegistrationError
from commhooks.hook.call import Handle
from commhooks.hook.tracing import not_traced
from commhooks.hosts.passing_group import PassingGroup
from commhooks.hosts.unnamed_calls import UnnamedCalls

__all__ = ["ScatteringGroup", "averages"]

# These reduce a list of tensors at once.
_LISTS = (
    *("allreduce_coalesced", "reduce_scatter"),
    *("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"),
)

_NO_AVERAGES = (dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT)


class ScatteringGroup(PassingGroup):
    """Reduces and scatters by a scheme, and is otherwise the group that it was made of.

    Warns once of each call that averages floating tensors and that the scheme is not for.

    Args:
        inside: that group.
        scheme: what runs in ``reduce_scatter_tensor`` with ``ReduceOp.SUM`` or ``AVG``.
        least: number of entries from which on a tensor is compressed.
        seed: base of random draws.
        owns: see :class:`PassingGroup`.
    """

    _attached: Any = None  # a model: whatever else there is travels as it is

    def __init__(
        self, inside: dist.ProcessGroup, scheme: Scheme, least: int, seed: int, *, owns: bool
    ) -> None:
        super().__init__(inside, owns=owns)
        self.least, self._seed = least, seed
        self._calls = UnnamedCalls(scheme, inside, seed=seed)
        self._told: set[str] = set()

    @property
    def _scheme(self) -> Scheme:
        return self._calls.scheme  # after a switch another one

    def _scatter(self, output: Tensor, input: Tensor, opts: Any) -> tuple[bool, Any]:
        """Returns whether the scheme has made a reduce-scatter, and its handle."""
        if self._attached is not None or input.numel() < self.least:
            return False, None
        fits = averages(input, opts.reduceOp)
        if fits and slots_of(self._scheme):
            raise RegistrationError(
                f"reduce_scatter of {input.numel()} entries in a process group of {self._scheme}, "
                f"which keeps memory by parameter; for FSDP commhooks.register(model, scheme) over "
                f"a plain process group"
            )
        if not (fits and self._scheme.traits.shards):
            self._warn("reduce_scatter_tensor", [input], opts.reduceOp)
            return False, None
        name, async_op = f"{input.numel()} entries of {input.dtype}", opts.asyncOp
        handle = self._calls.reduce_scatter(
            output, input, name, op=opts.reduceOp, async_op=async_op
        )
        if handle is None:
            return True, None
        # A list, as the future of a backend has.
        future = handle.get_future().then(lambda done: [done.value()])
        return True, Handle(future, output.device)

    def _warn(self, call: str, tensors: Sequence[Any], op: Any) -> None:
        # A list has the parts of all ranks.
        flat = [one for given in tensors for one in ([given] if _is_tensor(given) else given)]
        numel = sum(one.numel() for one in flat if one.is_floating_point())
        averages = not any(op == other for other in _NO_AVERAGES)
        silent = self._attached is not None or type(self._scheme) is Dense or call in self._told
        if silent or not averages or numel < self.least:
            return
        self._told.add(call)
        warnings.warn(
            f"{call} of {numel} entries in a process group of {self._scheme} travels as it is, not "
            f"compressed: such a group compresses all_reduce, and by schemes that reduce shards "
            f"reduce_scatter_tensor, of one floating tensor with SUM or AVG. For models of FSDP, "
            f"commhooks.register(model, scheme) over a plain process group is the way",
            RuntimeWarning,
            stacklevel=4,
        )


def averages(tensor: Tensor, op: Any) -> bool:
    """Whether a call asks for the sum or the mean of a tensor that a scheme can take."""
    # ``op`` on the left: torch compares the two kinds of operations in this order only.
    mean = op == dist.ReduceOp.SUM or op == dist.ReduceOp.AVG
    return mean and tensor.layout == torch.strided and tensor.is_floating_point()


def _is_tensor(given: Any) -> bool:
    return isinstance(given, Tensor)


def _by_scheme(name: str) -> Any:
    @not_traced
    def method(self: ScatteringGroup, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        opts = dist.ReduceScatterOptions() if opts is None else opts
        done, handle = self._scatter(output, input, opts)
        return handle if done else getattr(self.inside, name)(output, input, opts)

    return method


def _for_list(name: str) -> Any:
    @not_traced
    def method(self: ScatteringGroup, *given: Any, **options: Any) -> Any:
        *tensors, opts = (*given, *options.values())
        if tensors and hasattr(opts, "reduceOp"):
            self._warn(name, tensors[-1], opts.reduceOp)
        return getattr(self.inside, name)(*given, **options)

    return method


for _names, _made in ((SCATTERING, _by_scheme), (_LISTS, _for_list)):
    for _name in _names:
        if hasattr(dist.ProcessGroup, _name):
            setattr(ScatteringGroup, _name, _made(_name))
