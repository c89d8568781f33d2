"""Puts a scheme on a model that Lightning Fabric has set up with its strategy ``"ddp"``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from commhooks.core._scheme import Scheme
from commhooks.hosts._framework_hook import FrameworkHook

if TYPE_CHECKING:
    from lightning.fabric import Fabric

__all__ = ["CommHook"]


class CommHook(FrameworkHook):
    """Registers a scheme, and is saved and loaded in Fabric's state like model and optimizer.

    Args:
        fabric: after ``launch``.
        model: result of ``fabric.setup``.
        scheme: a name or a scheme.
        options: options of the scheme and of :func:`commhooks.register`.

    Raises:
        RegistrationError: the strategy does not wrap the model in DistributedDataParallel.

    Example:
        >>> model, optimizer = fabric.setup(model, optimizer)
        >>> comm = CommHook(fabric, model, "powersgd", rank=4)
        >>> fabric.save(path, {"model": model, "optimizer": optimizer, "comm": comm})
    """

    _advice = "use Fabric(strategy='ddp') on several devices, and give the model after fabric.setup"

    def __init__(
        self, fabric: Fabric, model: nn.Module, scheme: str | Scheme = "none", **options: Any
    ) -> None:
        super().__init__(scheme, **options)
        self.attach(model, fabric.world_size)
