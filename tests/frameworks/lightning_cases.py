"""Lightning in two processes: optimization of both kinds, strategies, and what is refused."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, TensorDataset

import commhooks
from commhooks.hosts.lightning import CommHook, CoreDDPStrategy
from tests.frameworks.report_probe import attempt, digest, main, network


class Automatic(L.LightningModule):
    """Lightning calls backward and the optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = network()

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


class Manual(Automatic):
    """Two backward passes of one forward pass each step, as for a GAN."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, _: int) -> None:
        first, last = self.optimizers()
        output = self.layers(batch[0])
        first.zero_grad()
        last.zero_grad()
        self.manual_backward(output.square().mean(), retain_graph=True)
        self.manual_backward(torch.nn.functional.cross_entropy(output, batch[1]))
        first.step()
        last.step()

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.SGD(self.layers[0].parameters(), 0.1),
            torch.optim.SGD(self.layers[2].parameters(), 0.05),
        ]


def loader() -> Any:
    points = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(points, points[:, :3].argmax(dim=1)), 8)


def fit(
    module: Any,
    folder: Path,
    comm: CommHook | None = None,
    strategy: Any = "ddp",
    devices: int = 2,
    **more: Any,
) -> L.Trainer:
    trainer = L.Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, max_epochs=2,
        callbacks=[] if comm is None else [comm], default_root_dir=folder,
        **{"logger": False, **more}, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, loader())
    return trainer


def trains(folder: Path) -> dict[str, Any]:
    """The weights after training in every way, and how often the hook was called."""
    facts: dict[str, Any] = {}
    strategies = {"ddp": lambda: "ddp", "core": CoreDDPStrategy}
    for kind in (Automatic, Manual):
        for name, strategy in strategies.items():
            for scheme in (None, "none", "int8"):
                module = kind()
                comm = None if scheme is None else CommHook(scheme)
                fit(module, folder, comm, strategy())
                seen: dict[str, Any] = {"weights": digest(module)}
                if comm is not None:
                    seen |= {"steps": comm.hook.step, "calls": comm.hook.calls}
                facts[f"{kind.__name__} {name} {scheme}"] = seen
    return facts


def logs(folder: Path) -> dict[str, Any]:
    """Shows the numbers that a logger of Lightning gets."""
    logger = CSVLogger(folder, name="log", version=0)
    trainer = fit(Automatic(), folder, CommHook("int8"), logger=logger, log_every_n_steps=2)
    trainer.strategy.barrier()
    rows = (folder / "log" / "version_0" / "metrics.csv").read_text().splitlines()
    return {"columns": rows[0].split(","), "rows": len(rows) - 1}


def refuses(folder: Path) -> dict[str, Any]:
    """The errors where a hook would not run."""
    state = commhooks.HookState("int8")
    both = DDPStrategy(ddp_comm_state=state, ddp_comm_hook=commhooks.comm_hook)

    def twice() -> L.Trainer:
        return L.Trainer(accelerator="cpu", callbacks=[CommHook("int8"), CommHook("int8")])

    refusals = {
        "hook of the strategy": attempt(lambda: fit(Automatic(), folder, CommHook("int8"), both)),
        "two callbacks": attempt(twice),
        "before fit": attempt(lambda: CommHook("int8").hook),
        "unknown scheme": attempt(lambda: fit(Automatic(), folder, CommHook("itn8"))),
    }
    state.close()
    return refusals


def alone(folder: Path) -> dict[str, Any]:
    """One process with Lightning's default strategy, which does not wrap the model."""
    with pytest.warns(RuntimeWarning, match="there is one process"):
        trained = fit(Automatic(), folder, CommHook("int8"), "auto", 1)
    return {"trained": trained.global_step}


def bare(folder: Path) -> dict[str, Any]:
    """As Lightning documents hooks, on a CPU: it registers nothing, and says nothing."""
    state = commhooks.HookState("int8")
    fit(Automatic(), folder, None, DDPStrategy(
        ddp_comm_state=state, ddp_comm_hook=commhooks.comm_hook
    ))  # fmt: skip
    warnings.simplefilter("always")  # the hook warns when it is dropped, or Python ends
    return {"calls": state.calls}


if __name__ == "__main__":
    main(trains=trains, logs=logs, refuses=refuses, alone=alone, bare=bare)
