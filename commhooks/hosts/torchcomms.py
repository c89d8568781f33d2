"""Puts a scheme into torchcomms, as one of its backends.

Written against ``TorchCommBackend`` of torchcomms, whose methods it has; torchcomms calls them by
position. A group of torch.distributed carries the bytes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore

from commhooks.core.scheme import Scheme, slots_of
from commhooks.errors import RegistrationError
from commhooks.hosts.carrier import carrier, discard
from commhooks.hosts.collectives import Collectives
from commhooks.hosts.torchcomms_methods import METHODS
from commhooks.wrappers.make import make
from ddp_core import group_store, group_timeout, made_in_time

__all__ = ["SchemeBackend", "register_backend"]

_BY_SCHEME = {"all_reduce": "all_reduce", "reduce_scatter_single": "reduce_scatter"}


def register_backend(
    scheme: str | Scheme = "none", *, name: str = "commhooks", least: int = 1024, **options: Any
) -> None:
    """Makes ``name`` a backend of torchcomms, whose sums of floating tensors a scheme makes.

    A communicator has the ranks of torch.distributed's default group.

    Args:
        scheme: a name or a scheme that keeps nothing between calls, such as "int8".
        name: of the backend.
        least: number of entries from which on a tensor is compressed.
        options: of the scheme, see :func:`commhooks.make`.

    Raises:
        RegistrationError: the scheme keeps memory, which belongs to tensors with names.

    Example:
        >>> commhooks.hosts.torchcomms.register_backend("int8")
        >>> comm = torchcomms.new_comm("commhooks", device, "gradients")
        >>> comm.all_reduce(tensor, torchcomms.ReduceOp.AVG, async_op=False)
    """
    from torchcomms._comms import TorchCommBackend, register_backend

    built = make(scheme, **options)
    if slots_of(built):
        raise RegistrationError(
            f"torchcomms.register_backend: {built} keeps memory of each tensor between calls, and "
            f"torchcomms does not name tensors; commhooks.Collectives takes names"
        )
    # torchcomms makes a communicator by calling the class without arguments.
    settings = {"scheme": built, "least": least, "get_backend_name": lambda self: name}
    register_backend(name, type("Backend", (SchemeBackend, TorchCommBackend), settings))


class SchemeBackend:
    """Runs a scheme in ``all_reduce`` and ``reduce_scatter_single``; all else travels as it is.

    Attributes:
        collectives: what runs the scheme, with ledger and reports.
    """

    scheme: Scheme
    least: int
    _part: Any = None  # the group of ranks that ``split`` has made

    def init(self, device: torch.device, name: str, options: Any) -> None:
        self._device, self._name, self._splits = device, name, 0
        self.group: Any = self._part or dist.group.WORLD
        self.collectives = Collectives(self.scheme, self.group)

    def finalize(self) -> None:
        self.collectives.close()
        if self._part is not None:
            discard(self._part)

    def get_rank(self) -> int:
        return int(self.group.rank())

    def get_size(self) -> int:
        return int(self.group.size())

    def get_comm_name(self) -> str:
        return self._name

    def split(self, ranks: list[int], name: str, options: Any) -> Any:
        self._splits += 1  # all ranks come, those without a group as well
        if self.get_rank() not in ranks:
            return None
        of_job, own = dist.get_process_group_ranks(self.group), ranks.index(self.get_rank())
        members, timeout = [of_job[one] for one in ranks], group_timeout(self.group)
        store = PrefixStore(f"split/{self._splits}/{ranks[0]}", group_store(self.group))
        child: Any = type(self)()
        child._part = made_in_time(self.group, lambda: carrier(store, members, own, timeout, name))
        child.init(self._device, name, options)
        child._set_device_and_options(self._device, options)  # as torchcomms does after ``init``
        return child

    def _fits(self, name: str, tensor: Tensor, op: Any) -> bool:
        can = name == "all_reduce" or self.scheme.traits.shards
        means = op == dist.ReduceOp.SUM or op == dist.ReduceOp.AVG
        return can and means and tensor.is_floating_point() and tensor.numel() >= self.least


def _method(name: str, function: Any, arguments: str) -> Any:
    names = [*arguments.split(), "async_op"]

    def method(self: SchemeBackend, *given: Any) -> Any:
        options = dict(zip(names, given, strict=True))
        if "op" in options:
            options["op"] = getattr(dist.ReduceOp, options["op"].type.name)
        if name in _BY_SCHEME and self._fits(name, given[-3], options["op"]):
            return getattr(self.collectives, _BY_SCHEME[name])(**options)
        return function(**options, group=self.group)

    return method


for _name, _of_torch in METHODS.items():
    setattr(SchemeBackend, _name, _method(_name, *_of_torch))
