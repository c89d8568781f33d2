"""Puts a scheme on a model that Lightning Fabric has set up with its strategy ``"ddp"``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from commhooks.hosts._framework_hook import FrameworkHook

if TYPE_CHECKING:
    from lightning.fabric import Fabric

__all__ = ["CommHook"]


class CommHook(FrameworkHook):
    """Registers a scheme, and is saved and loaded in Fabric's state like model and optimizer.

    Args:
        scheme: a name or a scheme.
        options: options of the scheme and of :func:`commhooks.register`.

    Example:
        >>> model, optimizer = fabric.setup(model, optimizer)
        >>> comm = CommHook("powersgd", rank=4).attach(fabric, model)
        >>> fabric.save(path, {"model": model, "optimizer": optimizer, "comm": comm})
    """

    _calls = 'CommHook("int8").attach(fabric, model), after fabric.setup'
    _advice = "use Fabric(strategy='ddp') on several devices, and give the model after fabric.setup"

    def attach(self, fabric: Fabric, model: nn.Module) -> CommHook:
        """Registers the scheme; does nothing, with a warning, in one process.

        Args:
            fabric: after ``launch``.
            model: result of ``fabric.setup``.

        Raises:
            RegistrationError: the strategy does not wrap the model in DistributedDataParallel.
        """
        self._check(hasattr(fabric, "world_size") and isinstance(model, nn.Module))
        self._attach(model, fabric.world_size)
        return self
