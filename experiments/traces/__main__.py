"""Records the gradients of small real trainings, for ``commhooks tradeoff --trace`` and ``replay``.

Run ``python -m experiments.traces``. Ranks are simulated in one process: every rank has its own
batches, and training continues with the mean of all gradients. Consecutive steps are recorded from
each stage on, into a folder for each task and stage, as ``characters_step100``. The first n ranks
of a trace are a trace of n ranks (``--ranks`` of ``commhooks tradeoff``), so 2, 4 and 8 ranks need
one training.

A run that was ended continues at its last checkpoint and records the same bits as one that was not.
What is there is not recorded again; delete a task's folders and its checkpoint to begin anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import Progress
from torch import nn

from commhooks.errors import MissingPackageError
from commhooks.research.trace import Trace
from commhooks.wrappers._traced import write
from experiments.tools.tasks import TASKS, Task
from experiments.traces.minilm import minilm

__all__ = ["RUNS", "Run", "record"]

CHECKPOINT_EVERY = 50  # steps


@dataclass(frozen=True)
class Run:
    """Describes what is recorded of a task.

    Attributes:
        task: makes the task for a number of ranks.
        stages: steps at which recording begins.
        steps: number of consecutive steps from each stage on.
    """

    task: Callable[[int], Task]
    stages: tuple[int, ...] = (0, 100, 500)
    steps: int = 30

    def wanted(self) -> dict[int, int]:
        """Returns the steps to record, each with its stage: the first, where stages overlap."""
        return {step: stage for stage in sorted(self.stages, reverse=True)
                for step in range(stage, stage + self.steps)}  # fmt: skip


# On 8 ranks: 1.8 GB, 2.4 GB, 0.7 GB; and 6 GB for 8 steps of MiniLM, of which 30 would be 22 GB.
RUNS: dict[str, Run] = {
    "digits": Run(TASKS["digits"]),
    "characters": Run(TASKS["characters"]),
    "lstm": Run(TASKS["lstm"]),
    "minilm": Run(minilm, stages=(0, 100), steps=4),
}


def record(name: str, run: Run, ranks: int, out: Path) -> Iterator[tuple[int, int, float]]:
    """Trains and records; yields the steps done, the steps of the whole run, and the loss.

    Args:
        name: of the task; the folders begin with it.
        run: what is recorded.
        ranks: simulated ranks.
        out: folder of the traces and of the checkpoint.

    Raises:
        MissingPackageError: the task's data or weights are not installed.
    """
    wanted = run.wanted()
    last = max(wanted) + 1
    missing = [
        step for step, stage in wanted.items() if not _is_there(out, name, stage, step, ranks)
    ]
    if not missing:
        yield last, last, float("nan")
        return
    task = run.task(ranks)
    torch.manual_seed(0)
    model = task.model()
    optimizer = task.optimizer(model)
    checkpoint = out / f"{name}.pt"
    begin = _resumed(checkpoint, ranks, min(missing), model, optimizer)
    for step in range(begin, last):
        if step % CHECKPOINT_EVERY == 0 or step in run.stages:
            _save(checkpoint, ranks, step, model, optimizer)
        loss = _train_step(
            task, model, optimizer, step, ranks, _folder(out, name, wanted.get(step))
        )
        yield step + 1, last, loss


def _train_step(
    task: Task,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: int,
    ranks: int,
    folder: Path | None,
) -> float:
    """Runs a step with the mean gradient of all ranks; returns the mean loss.

    Args:
        folder: where the gradients of each rank are written; None: nowhere.
    """
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    total = {name: torch.zeros_like(p) for name, p in named.items()}
    losses = 0.0
    for rank in range(ranks):
        model.zero_grad(set_to_none=True)
        x, target = task.batch(rank, step)
        loss = task.loss(model(x), target)
        loss.backward()  # type: ignore[no-untyped-call]
        losses += float(loss.detach())
        grads = {
            name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in named.items()
        }
        if folder is not None:
            write(folder, step, rank, grads)
        for name, grad in grads.items():
            total[name] += grad / ranks
    for name, p in named.items():
        p.grad = total[name]
    optimizer.step()
    return losses / ranks


def _folder(out: Path, name: str, stage: int | None) -> Path | None:
    return None if stage is None else out / f"{name}_step{stage}"


def _is_there(out: Path, name: str, stage: int, step: int, ranks: int) -> bool:
    # Ranks are written one after the other: with the last one, all are there.
    return any((out / f"{name}_step{stage}").glob(f"step{step:07}_rank{ranks - 1}_*.safetensors"))


# ---- checkpoints


def _save(
    path: Path, ranks: int, step: int, model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    saved = {
        "ranks": ranks,
        "step": step,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    torch.save(saved, part)
    part.replace(path)


def _resumed(
    path: Path, ranks: int, needed: int, model: nn.Module, optimizer: torch.optim.Optimizer
) -> int:
    """Loads the checkpoint if it is of as many ranks, and no later than the first step needed.

    Returns:
        The step to continue with; 0 if the checkpoint does not fit.
    """
    if not path.exists():
        return 0
    saved: dict[str, Any] = torch.load(path, weights_only=True)
    if saved["ranks"] != ranks or saved["step"] > needed:
        return 0
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return int(saved["step"])


# ---- the command


def _runs(tasks: str, stages: str, steps: int | None) -> dict[str, Run]:
    names = [name.strip() for name in tasks.split(",") if name.strip()]
    for name in names:
        if name not in RUNS:
            raise typer.BadParameter(f"{name!r} is not one of {', '.join(RUNS)}")
    try:
        changed: dict[str, Any] = {"stages": tuple(map(int, stages.split(",")))} if stages else {}
    except ValueError:
        raise typer.BadParameter(f"--stages are numbers with commas, got {stages!r}") from None
    if steps is not None:
        changed["steps"] = steps
    return {name: replace(RUNS[name], **changed) for name in names or RUNS}


def main(
    tasks: Annotated[
        str, typer.Option(help=f"Of {', '.join(RUNS)}; comma-separated. All by default.")
    ] = "",
    stages: Annotated[
        str,
        typer.Option(
            help="Steps at which recording begins, comma-separated. 0,100,500 by "
            "default; 0,100 for minilm."
        ),
    ] = "",
    steps: Annotated[
        int | None,
        typer.Option(min=1, help="Consecutive steps of a stage. 30 by default; 4 for minilm."),
    ] = None,
    ranks: Annotated[int, typer.Option(min=1, help="Simulated ranks.")] = 8,
    out: Annotated[Path, typer.Option(help="Folder of the traces.")] = Path("results/traces"),
) -> None:
    """Records the traces."""
    torch.set_num_threads(1)
    with Progress() as progress:
        for name, run in _runs(tasks, stages, steps).items():
            bar = progress.add_task(name, total=max(run.wanted()) + 1)
            try:
                for done, _, loss in record(name, run, ranks, out):
                    progress.update(bar, completed=done, description=f"{name}, loss {loss:.3f}")
            except MissingPackageError as error:
                if tasks:
                    raise typer.BadParameter(str(error)) from error
                progress.console.print(f"left out: {error}", markup=False, soft_wrap=True)
    for folder in sorted(out.glob("*_step*")):
        trace = Trace(folder)
        typer.echo(f"{folder}: {len(trace.steps)} steps of {trace.world_size} ranks")


if __name__ == "__main__":
    typer.run(main)
