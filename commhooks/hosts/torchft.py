"""Runs a hook over the process group of a torchft manager, which changes with the quorum.

Written against torchft's ``Manager``: ``wait_quorum``, ``errored``, ``report_error``,
``is_participating``, ``num_participants``, and the process group that it was given.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from commhooks._torch import comm_hooks
from commhooks.core._scheme import Scheme
from commhooks.errors import RegistrationError
from commhooks.hook import HookState, comm_hook
from ddp_core import completed

__all__ = ["register"]

Future = torch.futures.Future


def register(
    model: DistributedDataParallel, manager: Any, scheme: str | Scheme = "none", **options: Any
) -> HookState:
    """Registers a scheme on a model whose replicas a torchft manager keeps together.

    The hook follows the manager's quorum, step by step, see :meth:`HookState.change_group`; an
    error of an exchange goes to the manager, and the step is not committed.

    Args:
        model: torch's DistributedDataParallel (torchft's has a hook already) over
            ``torchft.process_group.ProcessGroupDummy(0, 1)``, with ``find_unused_parameters=True``:
            replicas that recover would else have other buckets.
        manager: ``torchft.Manager`` over a group that is made of torch's, as ``ProcessGroupGloo``.
        scheme, options: see :func:`commhooks.register`.

    Raises:
        RegistrationError: the model averages over other ranks itself, or has a hook.

    Example:
        >>> model = DistributedDataParallel(module, process_group=ProcessGroupDummy(0, 1),
        ...                                 find_unused_parameters=True)
        >>> hook = commhooks.hosts.torchft.register(model, manager, "int8")
    """
    wrapped = isinstance(model, DistributedDataParallel)
    if not wrapped or comm_hooks(model) or model.process_group.size() != 1:
        raise RegistrationError(
            "hosts.torchft.register: the model is torch's DistributedDataParallel without a hook, "
            f"over ProcessGroupDummy(0, 1), got {type(model).__name__}: the manager's group is the "
            f"hook's, not the model's"
        )
    # A group of this rank alone until there is a quorum; nothing is sent in it.
    alone = dist.ProcessGroup(0, 1)  # type: ignore[call-arg]
    state = HookState(scheme, model, process_group=alone, **options)
    model.register_comm_hook(_QuorumHook(manager, state), comm_hook)
    return state


class _QuorumHook:
    """Calls the hook, and moves it to the manager's process group before a step's first bucket.

    Attributes:
        hook_state: the hook that is called.
    """

    def __init__(self, manager: Any, hook: HookState) -> None:
        self._manager, self._hook = manager, hook
        self.hook_state = hook
        self._group: Any = None

    def start(self, bucket: Any) -> Future[Tensor]:
        """Starts the exchange of a bucket; after an error, returns the bucket as it is."""
        manager, buffer = self._manager, bucket.buffer()
        try:
            if manager.errored() is None:
                self._sync_group()
                if not manager.is_participating():  # a spare, or a replica that recovers
                    buffer.zero_()
                share = self._hook.world_size / manager.num_participants()
                mean = self._hook.start(bucket)
                return mean.then(lambda future: self._outcome(future, buffer, share))
        except Exception as error:
            manager.report_error(error)
        self._hook.step_aborted()  # the manager commits no step with an error
        return completed(buffer)

    def _sync_group(self) -> None:
        self._manager.wait_quorum()
        group = _group_inside(self._manager._pg)
        if group is not self._group:
            self._hook.change_group(group)
            self._group = group

    def _outcome(self, mean: Future[Tensor], buffer: Tensor, share: float) -> Tensor:
        if buffer.device.type != "cpu":
            _limit(self._manager)
        try:
            # Ranks that do not take part have sent zeros, and do not count.
            return mean.value() if share == 1 else mean.value() * share
        except Exception as error:
            self._manager.report_error(error)
            return buffer


def _group_inside(group: Any) -> Any:
    """Returns torch's process group inside torchft's wrappers."""
    while getattr(group, "_pg", None) is not None:
        group = group._pg
    return group


def _limit(manager: Any) -> None:
    """Aborts the group if work on the current GPU stream does not end within the timeout.

    torchft does so with collectives of its own. NCCL's watchdog would end the process instead.
    """
    with suppress(ImportError):  # a manager of another library
        from torchft.futures import stream_timeout

        stream_timeout(manager._pg.abort, manager._timeout)
