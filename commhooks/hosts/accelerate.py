"""Puts a scheme on a model that Hugging Face Accelerate has prepared."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from commhooks.core._scheme import Scheme
from commhooks.errors import RegistrationError
from commhooks.hosts._framework_hook import FrameworkHook

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["CommHook"]


class CommHook(FrameworkHook):
    """Registers a scheme; ``save_state`` and ``load_state`` of the accelerator include it.

    Args:
        accelerator: the accelerator that has prepared the model.
        model: result of ``accelerator.prepare``.
        scheme: a name or a scheme.
        options: options of the scheme and of :func:`commhooks.register`.

    Raises:
        RegistrationError: the model is not in DistributedDataParallel (one process, FSDP,
            DeepSpeed), or ``DistributedDataParallelKwargs(comm_hook=...)`` was given as well.

    Example:
        >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        >>> comm = CommHook(accelerator, model, "powersgd", rank=4)
    """

    _advice = (
        "start several processes (accelerate launch --multi-gpu, or torchrun) without FSDP and "
        "DeepSpeed, and give the model after accelerator.prepare"
    )

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        scheme: str | Scheme = "none",
        **options: Any,
    ) -> None:
        super().__init__(scheme, **options)
        given = getattr(accelerator.ddp_handler, "comm_hook", None)
        if getattr(given, "value", given) not in (None, "no"):
            raise RegistrationError(
                f"{self._name}: DistributedDataParallelKwargs(comm_hook={given}) is set as well. "
                f"Leave it out: Accelerate registers the members of its own enum, and ignores "
                f"everything else without a word"
            )
        if accelerator.project_configuration.save_on_each_node:
            self._to = None
        self.attach(model, accelerator.num_processes)
        accelerator.register_for_checkpointing(self)
