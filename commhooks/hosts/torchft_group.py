"""Defines ``SchemeProcessGroup``, a process group of torchft whose all-reduce runs a scheme."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from commhooks.core.scheme import Scheme
from commhooks.core.settings import fitting
from commhooks.hosts.scheme_group import averages
from commhooks.hosts.torchft_collectives import allreduce_quantized
from commhooks.hosts.torchft_quorum import fit_for_torchft
from commhooks.wrappers.make import make
from ddp_core import needs

with needs("commhooks.hosts.torchft_group", "torchft-nightly"):
    from torchft.process_group import ProcessGroup, ProcessGroupWrapper

__all__ = ["SchemeProcessGroup"]


class SchemeProcessGroup(ProcessGroupWrapper):
    """Averages by a scheme, and is otherwise the torchft group that it was made of.

    A ``torchft.Manager`` over it compresses what torchft averages: the gradients of its
    DistributedDataParallel, the parameters of LocalSGD, the pseudo-gradients of DiLoCo.

    Args:
        group: of torchft, made of torch's, as ``ProcessGroupGloo``.
        scheme: a name or a scheme that keeps nothing between calls.
        least: number of entries from which on a floating tensor is compressed.
        options: of the scheme, see :func:`commhooks.make`.

    Raises:
        RegistrationError: the scheme keeps memory, and torchft does not name tensors; or it
            returns no mean, and torchft asks for sums.

    Example:
        >>> manager = torchft.Manager(pg=SchemeProcessGroup(ProcessGroupGloo(), "int8"), ...)
    """

    def __init__(
        self,
        group: ProcessGroup,
        scheme: str | Scheme = "int8",
        *,
        least: int = 1024,
        **options: Any,
    ) -> None:
        super().__init__(pg=group)
        self._scheme = fit_for_torchft(make(scheme, **options))
        self._least = fitting("SchemeProcessGroup", "least", least, int)

    def allreduce(self, tensors: list[Tensor], opts: Any) -> Any:
        """Reduces by the scheme what it is for, and else by the group inside."""
        op, one = getattr(opts, "reduceOp", opts), tensors[0]
        if len(tensors) == 1 and averages(one, op) and one.numel() >= self._least:
            return allreduce_quantized(tensors, opts, self, scheme=self._scheme)
        return super().allreduce(tensors, opts)
