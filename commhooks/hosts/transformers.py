"""Puts a scheme into the ``Trainer`` of Hugging Face Transformers."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from commhooks.core._scheme import Scheme
from commhooks.errors import RegistrationError
from commhooks.hosts._framework_hook import FrameworkHook
from ddp_core import needs

with needs("commhooks.hosts.transformers", "transformers", "accelerate"):
    from transformers import TrainerCallback

if TYPE_CHECKING:
    from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments

__all__ = ["CommHook"]

_KEY = "commhooks"  # in the state of a Trainer


class CommHook(FrameworkHook, TrainerCallback):
    """Registers a scheme, saves and restores it with the Trainer's checkpoints, and logs.

    Args:
        scheme: a name or a scheme.
        resume_from: the folder given to ``train(resume_from_checkpoint=...)``, where that is not
            in the trainer's ``output_dir``.
        options: options of the scheme and of :func:`commhooks.register`.

    Raises:
        RegistrationError: during ``train``, if the model is not in DistributedDataParallel, or
            ``attach`` was not called.
        CheckpointError: during ``train``, if the state of the hook is not in the checkpoint.

    Example:
        >>> comm = CommHook("powersgd", rank=4).attach(trainer)
        >>> trainer.train(resume_from_checkpoint=True)
    """

    _calls = 'CommHook("int8").attach(trainer), before trainer.train'
    _advice = "start several processes (torchrun), without FSDP and DeepSpeed"

    def __init__(
        self,
        scheme: str | Scheme = "none",
        *,
        resume_from: str | Path | None = None,
        **options: Any,
    ) -> None:
        super().__init__(scheme, **options)
        self._trainer: Trainer | None = None
        self._resume_from = resume_from

    def attach(self, trainer: Trainer) -> CommHook:
        """Adds itself to the callbacks of a trainer that has not begun to train."""
        self._check(hasattr(trainer, "add_callback"))
        # Callbacks are given the bare model; the trainer knows the wrapped one.
        self._trainer = trainer
        if trainer.args.save_on_each_node:
            self._to = None
        trainer.add_callback(self)
        return self

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Registers the scheme, and loads the state of the resumed run's hook."""
        if self._trainer is None:
            raise RegistrationError(
                f"{self._name}: callbacks are not given the wrapped model. In place of "
                f"add_callback or callbacks=[...], call {self._calls}"
            )
        self._attach(self._trainer.model_wrapped, args.world_size)
        # The name differs between runs: a folder of another run is not taken for the right one.
        before = state.stateful_callbacks.get(_KEY)
        if before is not None:
            self._file = before["file"]
            self.load(self._resume_from or _folder(args, state))
        self._file = f"commhooks-{uuid.uuid4().hex[:8]}.pt"
        state.stateful_callbacks[_KEY] = {"file": self._file}

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Adds the state of all ranks to the folder of the checkpoint."""
        if not args.save_only_model:
            self.save(_folder(args, state))

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Logs the metrics of the hook wherever the Trainer logs."""
        if control.should_log and self._trainer is not None and (metrics := self.metrics()):
            self._trainer.log(metrics)


def _folder(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(args.output_dir, f"checkpoint-{state.global_step}")
