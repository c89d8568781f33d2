"""Puts a scheme on a model that Ray Train has prepared, in a worker's training function."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn

from commhooks.core._scheme import Scheme
from commhooks.errors import RegistrationError
from commhooks.hosts._framework_hook import FrameworkHook

__all__ = ["CommHook"]


class CommHook(FrameworkHook):
    """Registers a scheme; ``save`` and ``load`` use the folder of a Ray checkpoint.

    Args:
        model: result of ``ray.train.torch.prepare_model``.
        scheme: a name or a scheme.
        options: options of the scheme and of :func:`commhooks.register`.

    Raises:
        RegistrationError: the model is not in DistributedDataParallel (one worker, FSDP), or this
            is not a worker of a ``TorchTrainer``.

    Example:
        >>> comm = CommHook(prepare_model(model), "powersgd", rank=4)
        >>> comm.save(folder)  # all workers; rank 0 has the file
        >>> ray.train.report(comm.metrics(), checkpoint=Checkpoint.from_directory(folder))
    """

    _advice = (
        "use ScalingConfig(num_workers=2) or more and prepare_model's DistributedDataParallel, "
        "and give the model that prepare_model has returned"
    )

    def __init__(self, model: nn.Module, scheme: str | Scheme = "none", **options: Any) -> None:
        super().__init__(scheme, **options)
        if not dist.is_initialized():
            raise RegistrationError(
                f"{self._name}: no process group; call it in the training function of a "
                f"TorchTrainer, whose workers have one"
            )
        self.attach(model, dist.get_world_size())
