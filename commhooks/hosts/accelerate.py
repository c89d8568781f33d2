"""Puts a scheme on a model that Hugging Face Accelerate has prepared."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from commhooks.errors import RegistrationError
from commhooks.hosts._framework_hook import FrameworkHook

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["CommHook"]


class CommHook(FrameworkHook):
    """Registers a scheme; ``save_state`` and ``load_state`` of the accelerator include it.

    Args:
        scheme: a name or a scheme.
        options: options of the scheme and of :func:`commhooks.register`.

    Example:
        >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        >>> comm = CommHook("powersgd", rank=4).attach(accelerator, model)
    """

    _calls = 'CommHook("int8").attach(accelerator, model), after accelerator.prepare'
    _advice = (
        "start several processes (accelerate launch --multi-gpu, or torchrun) without FSDP and "
        "DeepSpeed, and give the model after accelerator.prepare"
    )

    def attach(self, accelerator: Accelerator, model: nn.Module) -> CommHook:
        """Registers the scheme; does nothing, with a warning, in one process.

        Args:
            accelerator: the accelerator that has prepared the model.
            model: result of ``accelerator.prepare``.

        Raises:
            RegistrationError: the model is not in DistributedDataParallel (FSDP, DeepSpeed), or
                ``DistributedDataParallelKwargs(comm_hook=...)`` was given as well.
        """
        self._check(hasattr(accelerator, "ddp_handler") and isinstance(model, nn.Module))
        given = getattr(accelerator.ddp_handler, "comm_hook", None)
        if getattr(given, "value", given) not in (None, "no"):
            raise RegistrationError(
                f"{self._name}: DistributedDataParallelKwargs(comm_hook={given}) is set as well. "
                f"Leave it out: Accelerate registers the members of its own enum, and ignores "
                f"everything else without a word"
            )
        if accelerator.project_configuration.save_on_each_node:
            self._to = None
        self._attach(model, accelerator.num_processes)
        accelerator.register_for_checkpointing(self)
        return self
