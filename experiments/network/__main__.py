"""Trains over limited links and compares the step times with those that were predicted.

Run ``python -m experiments.network``. Hosts (network namespaces) on one switch, each with a cable
of given rate, train models with one hook after the other, in turns. ``predicted`` is what
:mod:`commhooks.predict` says from the step without communication (the hook "noop"), the time of a
scheme's computations, and from the links, all of which are measured on the same ranks: nothing is
fitted to the steps that are predicted. Needs what ``experiments/tools/namespaces.py`` needs.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product, starmap
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import commhooks
from commhooks.auto import AutoHook
from commhooks.cli._arguments import listed
from commhooks.core._settings import shown
from commhooks.predict import (
    Recorder,
    ThisDevice,
    Workload,
    measure_contention,
    predict_step,
)
from commhooks.predict._advise import made_candidates
from commhooks.predict._headroom_steps import ScalarAllReduce
from commhooks.predict._link import measure_link
from commhooks.wrappers._feedback import unwrap_flush
from ddp_core import DistributedDataParallel
from experiments.network.front import made
from experiments.network.page import is_judged, ratios_of_links, short_name, where, written
from experiments.network.rates import drawn_by_rate, has_rates
from experiments.network.setups import CHOICE, Setup, setup_of
from experiments.network.torch_hooks import SAME, TORCH, register_of_torch
from experiments.tools.hosts import messages_from_hosts
from experiments.tools.models import MODELS
from experiments.tools.namespaces import reason_not_to_run, sent_nbytes
from experiments.tools.processes import Send
from experiments.tools.tables import replaced
from experiments.tools.turns import in_turns

# Factors of low rank travel in 16 bits, which costs nothing in quality (experiments.convergence).
SCHEMES = (
    *("none", "bf16", "int8", "int4"),
    'powersgd:rank=2,wire_dtype="bf16"',
    'acpsgd:rank=2,wire_dtype="bf16"',
    "topk",
)
# In buckets of 25 MiB, the first one, too, which torch fills with 1 MiB; copied as there.
_REPAIRED = "batched_powersgd:rank=2 on torch in 25 MiB by copies"
_LEAST, _MOST = 1e-3, 1e6  # of rates and delays: in full, these have no exponents
CAP_MB = 8.0  # ddp_core's default on the CPU
_FIRST_MB = 1.0  # of the first bucket, on both classes
_NOOP, _ONE = "noop", "one value"


@dataclass(frozen=True)
class Settings:
    """Describes a rank's run.

    Attributes:
        model: of ``experiments.tools.models``.
        schemes: as "powersgd:rank=2 on torch in 2 MiB", see :func:`setup_of`.
        mbit: Mbit/s of the link. 0: unlimited.
        delay_ms: milliseconds that a message is on its way, one way.
        turns: turns of all schemes.
        seconds: of training per turn and scheme, at least one step; one more is not timed if there
            are several.
    """

    model: str
    schemes: tuple[str, ...]
    mbit: float
    delay_ms: float = 0.0
    turns: int = 9
    seconds: float = 0.6


class _Run:
    """Trains a copy of the model with one hook.

    Attributes:
        hook: of this package; None for those of torch.
        times: seconds per step, by turn.
        sent: bytes per step that left the interface, by turn.
    """

    def __init__(self, settings: Settings, scheme: str, like: AutoHook | None = None) -> None:
        torch.manual_seed(0)
        model = MODELS[settings.model]
        self.input = model.make_input(model.batch)
        self.hook: Any = None
        if scheme in TORCH:
            self.ddp: Any = TorchDDP(model.build())
            register_of_torch(self.ddp, scheme)
        elif like is not None:
            cap_mb = like.bucket_cap_mb
            caps = None if cap_mb is None else [_FIRST_MB, cap_mb]
            self.ddp = DistributedDataParallel(model.build(), bucket_cap_mb_list=caps)
            self.hook = commhooks.register(self.ddp, unwrap_flush(like.scheme))
        else:
            setup = setup_of(scheme)
            self.ddp = _reduced(model.build(), setup)
            # Every candidate is allowed, and "auto" is compared with all of them.
            if scheme == "auto":
                self.hook = commhooks.register(
                    self.ddp,
                    "auto",
                    candidates=_candidates(settings.schemes),
                    max_error=9.0,
                    measure_steps=6,
                )
            else:
                wanted = ScalarAllReduce() if scheme == _ONE else made(setup.scheme)
                self.hook = commhooks.register(self.ddp, wanted)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=1e-4)
        self.times: list[float] = []
        self.sent: list[float] = []
        self.steps, self.warms_up = 1, False

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.ddp(self.input).float().square().mean().backward()
        self.optimizer.step()

    def turn(self, *, timed: bool = True) -> None:
        """Runs the steps of a turn; stores the seconds per step of the slowest rank."""
        if self.warms_up:
            self.step()
        dist.barrier()
        begin, sent = time.perf_counter(), sent_nbytes()
        for _ in range(self.steps):
            self.step()
        took = torch.tensor((time.perf_counter() - begin) / self.steps, dtype=torch.float64)
        sent = sent_nbytes() - sent
        dist.all_reduce(took, op=dist.ReduceOp.MAX)
        if timed:
            self.times.append(float(took))
            self.sent.append(sent / self.steps)

    def warm_up(self, settings: Settings) -> None:
        """Runs the steps before all decisions are taken, and chooses the steps of a turn."""
        for _ in range(3):  # dense steps, rebuilt buckets
            self.turn(timed=False)
        while isinstance(self.hook, AutoHook) and not self.hook.decided:
            self.turn(timed=False)
        begin = time.perf_counter()
        self.turn(timed=False)
        steps = torch.tensor(settings.seconds / (time.perf_counter() - begin))
        dist.all_reduce(steps, op=dist.ReduceOp.MIN)
        self.steps = max(1, int(steps))
        # Its memory has left the caches since its last turn. A step that is long does not notice.
        self.warms_up = self.steps > 1


def _reduced(model: nn.Module, setup: Setup) -> Any:
    """Returns the model in the setup's DistributedDataParallel."""
    if setup.on_torch:
        views = not setup.by_copies
        return TorchDDP(model, gradient_as_bucket_view=views, bucket_cap_mb=setup.cap_mb)
    return DistributedDataParallel(model, bucket_cap_mb=setup.cap_mb)


def _candidates(schemes: Sequence[str]) -> dict[str, commhooks.Scheme]:
    """Returns what "auto" chooses from."""
    # The same scheme in buckets of another size is no other candidate.
    names = (name for name in schemes if name not in (*TORCH, "auto"))
    return {name: made(name) for name in names if setup_of(name).scheme == name}


def run_rank(rank: int, world_size: int, send: Send, **fields: Any) -> None:
    """Trains in the process of a rank; rank 0 sends an object for each scheme."""
    settings = Settings(**fields)
    runs = {name: _Run(settings, name) for name in (_NOOP, _ONE, *settings.schemes)}
    for run in runs.values():
        run.warm_up(settings)
    if "auto" in runs:
        runs[CHOICE] = _Run(settings, CHOICE, runs["auto"].hook)
        runs[CHOICE].warm_up(settings)
    arrivals = _recorded(runs[_NOOP], steps=10)
    in_turns({name: run.turn for name, run in runs.items()}, settings.turns)
    workload = _of_turns(arrivals, runs[_NOOP].times)
    predicted = _predicted(settings, workload, runs)
    if rank == 0:
        for scheme, run in runs.items():
            plan = run.hook.plan if isinstance(run.hook, AutoHook) else ""
            row = {"scheme": scheme, "times": run.times, "sent": run.sent, "plan": plan}
            send(row | predicted.get(scheme, {}))


def _recorded(noop: _Run, *, steps: int) -> Workload:
    """Returns the step without communication, with the time of each gradient."""
    recorder = Recorder(noop.ddp.module)
    for step in range(steps + 1):
        begin = time.perf_counter()
        dist.barrier()  # as in training, where ranks wait for each other in every step
        recorder.step_begins(time.perf_counter() - begin)
        if step < steps:
            noop.step()
    recorder.close()
    return recorder.workload(type(noop.ddp.module).__name__)


def _of_turns(workload: Workload, noop: list[float]) -> Workload:
    """Returns a workload with the step times of the turns, so that both saw the same machine.

    Args:
        workload: a recorded step without communication.
        noop: seconds of a step without communication.
    """
    factor = statistics.median(noop) / workload.compute_s
    assert workload.ready_s is not None
    return replace(
        workload,
        forward_s=factor * workload.forward_s,
        backward_s=factor * workload.backward_s,
        optimizer_s=factor * workload.optimizer_s,
        ready_s=tuple(factor * seconds for seconds in workload.ready_s),
        per_bucket_overhead_s=0.0,
    )


def _behind_s(runs: dict[str, _Run], workload: Workload, **links: Any) -> float:
    """Returns the seconds per bucket that ranks wait for the slowest one.

    They are what a step with one value per bucket takes longer than one without communication,
    less what the links take for these values.
    """
    noop, one_value = runs[_NOOP].times, runs[_ONE].times
    longer = statistics.median(a - b for a, b in zip(one_value, noop, strict=True))
    built = runs[_ONE].hook.scheme
    on_links = predict_step(built, workload, cap_mb=CAP_MB, **links).step_s - workload.compute_s
    return max(longer - on_links, 0.0) / len(workload.buckets(cap_mb=CAP_MB).ready)


def _predicted(
    settings: Settings, workload: Workload, runs: dict[str, _Run]
) -> dict[str, dict[str, Any]]:
    """Returns predictions of this package's schemes, and of torch's that are the same."""
    group = dist.group.WORLD
    assert group is not None
    fabric = measure_link(group, budget_s=5)
    dist.barrier()
    device = ThisDevice("cpu", contention=measure_contention("cpu"))
    links: dict[str, Any] = {"ranks": group.size(), "fabric": fabric, "device": device}
    workload = replace(workload, per_bucket_overhead_s=_behind_s(runs, workload, **links))
    rows = {}
    for scheme in runs:
        if scheme in TORCH and scheme not in SAME:  # its arithmetic is another one than ours
            continue
        setup = setup_of(SAME.get(scheme, scheme))
        of_hook = scheme in ("auto", CHOICE, _ONE)
        built = runs[scheme].hook.scheme if of_hook else made(setup.scheme)
        cap_mb = 25.0 if scheme in TORCH or built.traits.rounds > 1 else CAP_MB
        # A size that is asked for is that of the first bucket, too.
        first_mb, cap_mb = setup.cap_mb or _FIRST_MB, setup.cap_mb or cap_mb
        if scheme in ("auto", CHOICE):
            cap_mb = runs["auto"].hook.bucket_cap_mb or CAP_MB
        dist.barrier()  # all ranks time the same scheme at once, as in training
        step = predict_step(built, workload, cap_mb=cap_mb, first_mb=first_mb, **links)
        rows[scheme] = {"predicted": step.step_s, "wire": step.wire_s, "codec": step.codec_s}
    link = fabric.between
    rows[_NOOP] |= {"latency": link.latency, "bandwidth": link.bandwidth}
    return rows


def _exact(number: float) -> str:
    return str(number).removesuffix(".0")


def _rows(settings: Settings, hosts: int) -> list[dict[str, Any]]:
    rate = f"{_exact(settings.mbit)}mbit" if settings.mbit else None
    task = asdict(settings)
    messages = messages_from_hosts(
        *(run_rank, task),
        hosts=hosts,
        rate=rate,
        delay_s=settings.delay_ms / 1e3,
        timeout=900,
    )
    rows = [message.content for message in messages]
    noop = next(row for row in rows if row["scheme"] == "noop")
    for row in rows:
        # In pairs, turn by turn: a machine that gets slower for a while slows both.
        pairs = zip(row["times"], noop["times"], strict=True)
        ratios = [taken / without for taken, without in pairs]
        row["over"] = statistics.median(ratios)
        spread = statistics.median(abs(ratio - row["over"]) for ratio in ratios)
        # Of the median: 1.48 and 1.25 as in a normal distribution.
        row["over_se"] = 1.48 * 1.25 * spread / math.sqrt(len(ratios))
        row["step"] = row["over"] * statistics.median(noop["times"])
    return [
        {
            "model": settings.model,
            "hosts": hosts,
            "mbit": settings.mbit,
            "delay_ms": settings.delay_ms,
            "turns": settings.turns,
            "scheme": row["scheme"],
            "step_ms": 1e3 * row["step"],
            "predicted_ms": 1e3 * row.get("predicted", math.nan),
            "error": row.get("predicted", math.nan) / row["step"] - 1,
            "over_noop": row["over"],
            "standard_error": row["over_se"],
            "exposed_ms": 1e3 * row["step"] * (1 - 1 / row["over"]),
            "spread": (max(row["times"]) - min(row["times"])) / statistics.median(row["times"]),
            "sent_mb": statistics.median(row["sent"]) / 1e6,
            "wire_ms": 1e3 * row.get("wire", math.nan),
            "codec_ms": 1e3 * row.get("codec", math.nan),
            "measured_latency_us": 1e6 * noop["latency"],
            "measured_mbit": 8e-6 * noop["bandwidth"],
            "plan": row["plan"],
        }
        for row in rows
    ]


def _table(rows: list[dict[str, Any]], title: str) -> Table:
    table = Table("hook", "step", "over noop", "sent", "predicted", "error", title=title)
    for row in rows:
        table.add_row(
            short_name(row["scheme"]),
            f"{row['step_ms']:.1f} ms",
            f"{row['over_noop']:.2f}",
            f"{row['sent_mb']:.2f} MB",
            "" if math.isnan(row["error"]) else f"{row['predicted_ms']:.1f} ms",
            "" if math.isnan(row["error"]) else f"{100 * row['error']:+.0f} %",
        )
    return table


def _median_error(rows: list[dict[str, Any]]) -> float:
    table = pd.DataFrame(rows)
    errors = pd.to_numeric(table[table.scheme.map(is_judged)].error, errors="coerce")
    return float(errors.abs().median())


def _models(text: str) -> list[str]:
    names = listed("--models", text)
    for name in names:
        if name not in MODELS:
            raise typer.BadParameter(f"--models: {shown(name)} is not one of {', '.join(MODELS)}")
    return names


def _numbers(option: str, text: str) -> list[float]:
    """Returns the numbers of a list, each once."""
    try:
        numbers = list(dict.fromkeys(map(float, listed(option, text))))
    except ValueError:
        numbers = [math.nan]
    if not all(number == 0 or _LEAST <= number <= _MOST for number in numbers):
        raise typer.BadParameter(
            f"{option} {shown(text)}: each is 0 or from {_LEAST:g} to {_MOST:,.0f}, with commas, "
            f"as in 200,0.5,0"
        )
    return numbers


def _schemes(text: str) -> tuple[str, ...]:
    """Returns the setups of a list, each once; makes their schemes, which checks their options."""
    names = tuple(filter(None, dict.fromkeys(map(str.strip, text.split(";")))))
    if not names:
        raise typer.BadParameter(f"--schemes {shown(text)}: give one or more, with semicolons")
    for name in names:
        try:
            if name == "auto":
                made_candidates(_candidates(names))
            elif name not in TORCH:
                made(setup_of(name).scheme)
        except (TypeError, ValueError) as error:
            raise typer.BadParameter(f"--schemes {shown(name)}: {error}") from error
    return names


def _read(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    # Python's float, since some releases of pandas lose the last digit.
    table = pd.read_csv(path, dtype={"plan": str}, converters={"mbit": float, "delay_ms": float})
    return table.fillna({"plan": ""}).to_dict("records")


def _write(rows: list[dict[str, Any]], path: Path) -> None:
    # Rates and delays say whether a cell is there, so they are written with all digits.
    asked = {name: [_exact(row[name]) for row in rows] for name in ("mbit", "delay_ms")}
    pd.DataFrame(rows).assign(**asked).to_csv(path, index=False, float_format="%.4g")


def _is_there(rows: list[dict[str, Any]], settings: Settings, hosts: int, out: Path) -> bool:
    """Whether a table has the rows of a cell.

    Raises:
        typer.BadParameter: it has them with other schemes or turns. A cell's rows are of one run,
            since all are compared with the step without communication of the same turns.
    """
    cell = (settings.model, hosts, settings.mbit, settings.delay_ms)
    keys = ("model", "hosts", "mbit", "delay_ms")
    there = [row for row in rows if tuple(row[key] for key in keys) == cell]
    if not there:
        return False
    schemes = {row["scheme"] for row in there} - {CHOICE}
    asked = {_NOOP, _ONE, *settings.schemes}
    turns = {row.get("turns", "unknown") for row in there}
    if schemes == asked and turns == {settings.turns}:
        return True
    different = "; ".join(sorted(schemes ^ asked)) or "none"
    raise typer.BadParameter(
        f"--out {out} has {where(pd.Series(there[0]))} from a run with other schemes or turns "
        f"(schemes of only one of both: {different}; its turns: {', '.join(map(str, turns))}), and "
        f"rows of two runs are not mixed: name another file, or give the same --schemes and --turns"
    )


def main(
    models: Annotated[str, typer.Option(help="Models, comma-separated.")] = ",".join(MODELS),
    rates: Annotated[str, typer.Option(help="Mbit/s; 0: unlimited.")] = "200,1000,10000,0",
    delays: Annotated[str, typer.Option(help="Delays of a message, ms.")] = "0",
    hosts: Annotated[int, typer.Option(help="Number of hosts.", min=2, max=254)] = 2,
    schemes: Annotated[str, typer.Option(help="As 'topk; bf16 on torch in 25 MiB'.")] = ";".join(
        (*SCHEMES, *TORCH, _REPAIRED, "auto")
    ),
    turns: Annotated[int, typer.Option(help="Turns of all hooks.", min=5)] = 9,
    out: Annotated[Path, typer.Option(help="The table is written there.", dir_okay=False)] = Path(
        "results/network.csv"
    ),
) -> None:
    """Prints measured and predicted step times."""
    some = _schemes(schemes)
    numbers = _numbers("--rates", rates), _numbers("--delays", delays)
    cells = starmap(Settings, product(_models(models), [some], *numbers, [turns]))
    rows = _read(out)
    # What is there already is not measured again.
    missing = [settings for settings in cells if not _is_there(rows, settings, hosts, out)]
    if missing and (reason := reason_not_to_run()):
        sys.exit(f"experiments.network: {reason}")
    console = Console()
    out.parent.mkdir(parents=True, exist_ok=True)
    for settings in missing:
        new = _rows(settings, hosts)
        console.print(_table(new, where(pd.Series(new[0]))))
        rows += new
        _write(rows, out)
    table = pd.DataFrame(rows)
    written(rows, out.with_suffix(".html"), out.with_suffix(".png"))
    if has_rates(table):
        drawn_by_rate(table).savefig(out.with_name(f"{out.stem}_by_rate.png"), dpi=130)
    page = out.with_name("README.md")
    if page.exists() and f"<{out.stem}>" in page.read_text():  # that of docs/results/network
        page.write_text(replaced(page.read_text(), out.stem, ratios_of_links(table)))
    console.print(f"median error {100 * _median_error(rows):.1f} %; wrote {out}")


if __name__ == "__main__":
    typer.run(main)
