"""Puts a scheme into a Lightning ``Trainer`` that runs ``DDPStrategy``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from commhooks.core._scheme import Scheme
from commhooks.errors import RegistrationError
from commhooks.hosts._framework_hook import FrameworkHook
from ddp_core import DistributedDataParallel, needs

with needs("commhooks.hosts.lightning", "lightning"):
    from lightning.pytorch import Callback
    from lightning.pytorch.strategies import DDPStrategy

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

__all__ = ["CommHook", "CoreDDPStrategy"]


class CommHook(FrameworkHook, Callback):
    """Registers a scheme, saves and restores it with Lightning's checkpoints, and logs.

    Works on every device, with automatic and with manual optimization.

    Args:
        scheme: a name or a scheme.
        log: writes :meth:`metrics` to the trainer's loggers every ``log_every_n_steps`` steps.
        options: options of the scheme and of :func:`commhooks.register`.

    Raises:
        RegistrationError: during ``fit``, if the strategy does not wrap the model in
            DistributedDataParallel, or was given a hook of its own.

    Example:
        >>> comm = CommHook("powersgd", rank=4)
        >>> trainer = Trainer(strategy="ddp", devices=2, callbacks=[comm])
    """

    _calls = 'Trainer(callbacks=[CommHook("int8")])'
    _advice = "use Trainer(strategy='ddp'), which wraps the model in DistributedDataParallel"

    def __init__(self, scheme: str | Scheme = "none", *, log: bool = True, **options: Any) -> None:
        super().__init__(scheme, **options)
        self._log, self._logged = log, 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuses a strategy with a hook of its own."""
        if stage == "fit" and getattr(trainer.strategy, "_ddp_comm_hook", None) is not None:
            raise RegistrationError(
                f"{self._name}: DDPStrategy(ddp_comm_hook=...) is set as well, and a model takes "
                f"one hook. Leave it out: Lightning registers it on CUDA only, and neither saves "
                f"nor restores its state"
            )

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Registers the scheme: the strategy has wrapped the model, and callbacks are restored."""
        self._attach(trainer.strategy.model, trainer.world_size)

    def on_train_batch_end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        """Logs the metrics of the hook."""
        # With accumulation several batches are one step; manual optimization counts optimizers.
        step, every = trainer.global_step, trainer.log_every_n_steps
        if self._log and every and step // every > self._logged // every:
            self._logged, metrics = step, self.metrics()
            for logger in trainer.loggers if metrics else ():
                logger.log_metrics(metrics, step=step)


class CoreDDPStrategy(DDPStrategy):
    """Wraps the model in ``ddp_core.DistributedDataParallel``; other arguments are DDPStrategy's.

    Example:
        >>> trainer = Trainer(strategy=CoreDDPStrategy(), devices=2, callbacks=[CommHook("int8")])
    """

    def _setup_model(self, model: Any) -> DistributedDataParallel:
        devices = self.determine_ddp_device_ids()
        return DistributedDataParallel(model, device_ids=devices, **self._ddp_kwargs)
