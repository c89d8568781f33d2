"""Runs the study ``python -m experiments.bandwidth``: on which link which scheme pays."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from experiments.bandwidth.links import (
    Link,
    how_made,
    messages_on,
    parse,
    settings_on,
)
from experiments.bandwidth.plots import draw
from experiments.bandwidth.sentences import HOW_TO_READ, verdict
from experiments.bandwidth.table import compared, computed_cases, environment, printed
from experiments.tools.namespaces import access
from experiments.tools.processes import run_ranks
from experiments.tools.schemes import ON_LINKS, SCHEMES
from experiments.tools.tasks import TASKS
from experiments.tools.training import Settings, train

WIDTH = 80  # of tables and sentences; a wider terminal shows the same
Case = dict[str, Any]


@dataclass(frozen=True)
class _Study:
    """Runs the schemes on one link after the other.

    Attributes:
        settings: settings of the run without a limit, whose bytes, errors and losses are in all
            tables.
        on_links: schemes that are timed on limited links.
        world_size: number of processes.
        make_links: whether limited links are made; False: step times are computed.
        progress: shows how far the processes are.
    """

    settings: Settings
    on_links: Sequence[str]
    world_size: int
    make_links: bool
    progress: Progress

    def unlimited(self) -> dict[str, Case]:
        """Trains every scheme on this machine and returns the results by name."""
        messages = run_ranks(train, self.world_size, self.settings)
        return self._collected("unlimited", self.settings, messages)

    def on(self, link: Link, unlimited: dict[str, Case]) -> pd.DataFrame:
        """Returns the table of a link, and times the schemes on it if the link can be made."""
        names = list(unlimited)
        if link.rate is not None:
            names = [name for name in names if name in self.on_links]
        cases = [unlimited[name] for name in names]
        estimates = computed_cases(link, cases, self.settings.bucket_cap_mb)
        if link.rate is None:
            return compared(link, "measured", cases, estimates)
        if not self.make_links:
            return compared(link, "computed", estimates, estimates)
        here = settings_on(link, self.settings, names, cases[0]["dense_bytes"])
        timed = self._collected(link.name, here, messages_on(link, here, self.world_size))
        # Only times depend on the link. Bytes, errors and losses are those of the longer run.
        times = ("block_s", "exposed_s")
        cases = [unlimited[name] | {key: timed[name][key] for key in times} for name in names]
        return compared(link, "measured", cases, estimates)

    def _collected(
        self, name: str, settings: Settings, messages: Iterable[dict[str, Any]]
    ) -> dict[str, Case]:
        """Returns the results by name, and moves a progress bar."""
        cases: dict[str, Case] = {}
        bar = self.progress.add_task(name, total=settings.total_steps)
        for message in messages:
            if "case" in message:
                cases[message["case"]["hook"]] = message["case"]
            else:
                text = f"{name}: {message['hook']}"
                self.progress.update(bar, advance=message["steps"], description=text)
        self.progress.update(bar, description=name)
        return cases


def main(
    steps: Annotated[int, typer.Option(help="Training steps per scheme.", min=60)] = 80,
    world_size: Annotated[int, typer.Option(help="Processes.", min=2)] = 2,
    seed: Annotated[int, typer.Option(help="Seed of models, batches and draws.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for tables and plots.")] = Path(
        "results/bandwidth"
    ),
    task: Annotated[str, typer.Option(help=f"One of {', '.join(TASKS)}.")] = "characters",
    links: Annotated[str, typer.Option(help="Comma-separated.")] = "unlimited,1gbit,100mbit",
    schemes: Annotated[
        str, typer.Option(help="Separated by semicolons; all by default, some on limited links.")
    ] = "",
    computed: Annotated[
        bool, typer.Option("--computed", help="Compute limited links from bytes; make none.")
    ] = False,
) -> None:
    """Trains a model with every scheme, on each link, and compares time, bytes and error."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # runs what ends the processes
    begin = time.perf_counter()
    chosen = _names(schemes, SCHEMES, ";") if schemes else list(SCHEMES)
    all_links = _links(links)
    settings = Settings(_names(task, TASKS, ",")[0], chosen, steps=steps, block=2, seed=seed)
    console = Console(width=WIDTH, highlight=False)
    if any(link.rate for link in all_links):
        _say(console, how_made(access(), wanted=not computed))
    with _progress(console) as progress:
        study = _Study(
            settings,
            on_links=chosen if schemes else ON_LINKS,
            world_size=world_size,
            make_links=not computed and access().kind != "none",
            progress=progress,
        )
        unlimited = study.unlimited()
        tables = {}
        for link in all_links:
            tables[link] = study.on(link, unlimited)
            _say(console, printed(tables[link], link, world_size))
    for link, rows in tables.items():  # at the end, where a reader looks first
        _say(console, verdict(link, rows))
    _say(console, HOW_TO_READ)
    facts = {
        **environment(),
        "links": how_made(access(), wanted=not computed),
        "world_size": world_size,
        "seed": seed,
        "steps": settings.total_steps // len(chosen),
        "seconds": round(time.perf_counter() - begin),
    }
    losses = {name: case["losses"] for name, case in unlimited.items()}
    for path in _write(pd.concat(tables.values()), losses, facts, out):
        console.print(f"wrote {path}")


def _say(console: Console, what: Any) -> None:
    console.print(what)
    console.print()


def _names(given: str, known: Iterable[str], separator: str) -> list[str]:
    names = [name.strip() for name in given.split(separator) if name.strip()]
    for name in names:
        if name not in known:
            raise typer.BadParameter(f"{name!r} is not one of {f'{separator} '.join(known)}")
    if not names:
        raise typer.BadParameter(f"names none of {f'{separator} '.join(known)}")
    return list(dict.fromkeys(names))


def _links(given: str) -> list[Link]:
    try:
        return [parse(text.strip()) for text in dict.fromkeys(given.split(","))]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description:34}"), BarColumn(18), MofNCompleteColumn())
    return Progress(*columns, TimeElapsedColumn(), console=console)


def _write(
    table: pd.DataFrame, losses: dict[str, list[float]], facts: dict[str, Any], out: Path
) -> list[Path]:
    """Writes tables, settings and plots; returns their paths."""
    out.mkdir(parents=True, exist_ok=True)
    table.to_csv(out / "bandwidth.csv", index=False, float_format="%.6g")
    pd.DataFrame(losses).rename_axis("step").to_csv(out / "losses.csv", float_format="%.6g")
    (out / "run.json").write_text(json.dumps(facts, indent=2) + "\n")
    return [out / "bandwidth.csv", out / "losses.csv", out / "run.json", *draw(table, out)]


if __name__ == "__main__":
    typer.run(main)
