"""The Trainer of Transformers: what it logs, where it resumes from, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from commhooks.hosts.transformers import CommHook
from tests.frameworks.report_probe import attempt, digest, main


def trainer(folder: Path, steps: int = 4, **more: Any) -> Trainer:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=50, n_positions=16, n_embd=32, n_layer=1, n_head=2)
    rows = torch.randint(50, (64, 16), generator=torch.Generator().manual_seed(0))
    settings: dict[str, Any] = {"save_steps": 2, "logging_steps": 2, **more}
    return Trainer(
        model=GPT2LMHeadModel(config),
        args=TrainingArguments(
            output_dir=str(folder), max_steps=steps, use_cpu=True, report_to=[],
            per_device_train_batch_size=4, lr_scheduler_type="constant", disable_tqdm=True,
            **settings,
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
    )  # fmt: skip


def trains(folder: Path) -> dict[str, Any]:
    """The weights after training with each scheme, and without a hook; what was logged."""
    facts: dict[str, Any] = {}
    for scheme in (None, "none", "int8"):
        made = trainer(folder / str(scheme), gradient_accumulation_steps=2)
        comm = None if scheme is None else CommHook(scheme).attach(made)
        made.train()
        facts[str(scheme)] = [digest(made.model), 0 if comm is None else comm.hook.step]
        facts["logged"] = [
            row["step"] for row in made.state.log_history if "comm/wire_bytes" in row
        ]
    return facts


def resumes(folder: Path) -> dict[str, Any]:
    """Residuals after resuming from other folders, and the errors where they are not there."""

    def run(place: str, steps: int, comm: bool = True, **options: Any) -> Any:
        made = trainer(folder / place, steps)
        hook = CommHook("topk", ratio=0.05, **options).attach(made) if comm else None
        return made, hook

    made, comm = run("first", 2)
    made.train()
    saved = str(folder / "first" / "checkpoint-2")
    made, _ = run("second", 2)
    made.train()
    facts: dict[str, Any] = {}
    # A checkpoint of the same step is in the folder, of another run.
    made, _ = run("second", 4)
    facts["another run"] = attempt(lambda: made.train(resume_from_checkpoint=saved))
    made, after = run("third", 4)
    facts["elsewhere"] = attempt(lambda: made.train(resume_from_checkpoint=saved))
    made, after = run("third", 4, resume_from=saved)
    made.train(resume_from_checkpoint=saved)
    facts["steps"] = [comm.hook.step, after.hook.step]
    made, _ = run("bare", 2, comm=False)
    made.train()
    made, fresh = run("bare", 4)
    made.train(resume_from_checkpoint=True)
    facts["fresh"] = fresh.hook.step
    return facts


def alone(folder: Path) -> dict[str, Any]:
    """One process, whose model the Trainer does not wrap: a script runs as it is."""
    made = trainer(folder)
    CommHook("int8").attach(made)
    with pytest.warns(RuntimeWarning, match="there is one process"):
        made.train()
    bare = trainer(folder)
    bare.add_callback(CommHook("int8"))
    return {"trained": made.state.global_step, "bare": attempt(bare.train)}


if __name__ == "__main__":
    main(trains=trains, resumes=resumes, alone=alone)
