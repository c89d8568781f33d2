"""Puts a scheme on a model that Ray Train has prepared, in a worker's training function."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

from commhooks.errors import RegistrationError
from commhooks.hosts._framework_hook import FrameworkHook

__all__ = ["CommHook"]


class CommHook(FrameworkHook):
    """Registers a scheme; ``save`` and ``load`` use the folder of a Ray checkpoint.

    Args:
        scheme: a name or a scheme.
        options: options of the scheme and of :func:`commhooks.register`.

    Example:
        >>> comm = CommHook("powersgd", rank=4).attach(prepare_model(model))
        >>> comm.save(folder)  # all workers; rank 0 has the file
        >>> ray.train.report(comm.metrics(), checkpoint=Checkpoint.from_directory(folder))
    """

    _calls = 'CommHook("int8").attach(model), after prepare_model'
    _advice = (
        "use ScalingConfig(num_workers=2) or more and prepare_model's DistributedDataParallel, "
        "and give the model that prepare_model has returned"
    )

    def attach(self, model: nn.Module) -> CommHook:
        """Registers the scheme; does nothing, with a warning, with one worker.

        Args:
            model: result of ``ray.train.torch.prepare_model``.

        Raises:
            RegistrationError: the model is not in DistributedDataParallel (FSDP), or this is not a
                worker of a ``TorchTrainer``.
        """
        self._check(isinstance(model, nn.Module))
        if not dist.is_initialized():
            raise RegistrationError(
                f"{self._name}: no process group; call it in the training function of a "
                f"TorchTrainer, whose workers have one"
            )
        self._attach(model, dist.get_world_size())
        return self
