"""Runs cases of some seeds, and says which broke a rule or cost too much."""

from __future__ import annotations

import faulthandler
import gc
import random
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TextIO

import torch
import torch.distributed as dist

from tests.hostile.cases import KINDS, Target

__all__ = ["Cost", "Outcome", "run", "run_some"]

# Of one case: seconds of CPU, and memory beyond what the process had before.
MAX_BYTES, MAX_SECONDS = 64 << 20, 1.0

# Saved states are the most exposed; the command line takes a person's word.
_SHARES = {
    "state": 20,
    "torch file": 10,
    "pickled hook": 8,
    "pickled form": 12,
    "plan": 6,
    "prediction": 3,
    "safetensors file": 10,
    "flat form": 8,
    "diloco": 9,
    "command line": 5,
}


class Cost(NamedTuple):
    """The cost of one call."""

    nbytes: int
    seconds: float

    def error(self) -> str | None:
        """Names what is too much; None if nothing is."""
        if self.nbytes > MAX_BYTES:
            return f"took {self.nbytes >> 20} MB"
        return f"took {self.seconds:.1f} s" if self.seconds > MAX_SECONDS else None


class Outcome(NamedTuple):
    """The outcome of some cases."""

    counts: Counter[str]
    failures: list[str]
    worst: dict[str, Cost]


def run_some(first: int, last: int, noted: str) -> Outcome:
    """Runs the cases from one seed to before another, in a process of its own.

    Args:
        noted: the file that has the seed at work, should the process end with it.
    """
    faulthandler.enable()
    with tempfile.TemporaryDirectory(prefix="hostile-") as folder, open(noted, "w") as note:
        return run(_note_each(range(first, last), note), Path(folder))


def _note_each(seeds: Iterable[int], note: TextIO) -> Iterator[int]:
    for seed in seeds:
        note.seek(0)
        note.write(f"{seed:12d}")
        note.flush()
        yield seed


def run(seeds: Iterable[int], folder: Path) -> Outcome:
    """Runs a case for each seed; needs a process group of one rank, or makes one."""
    torch.set_num_threads(1)
    if not dist.is_initialized():
        store = dist.FileStore(str(folder / "store"), 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    outcome = Outcome(Counter(), [], {})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        target = Target(folder)
        for kind in KINDS:  # what a first call imports or builds is nobody's
            for seed in range(5):
                with suppress(Exception):
                    KINDS[kind](target, random.Random(seed))
        gc.collect()
        gc.freeze()  # looking through all that torch is made of is no case's
        for seed in seeds:
            _case(seed, target, outcome)
    return outcome


def _case(seed: int, target: Target, outcome: Outcome) -> None:
    rng = random.Random(seed)
    (kind,) = rng.choices(list(_SHARES), list(_SHARES.values()))
    problems = []

    def call() -> None:
        try:
            KINDS[kind](target, rng)
        except Exception as error:  # whatever it is: no case may end like this
            problems.append(f"{type(error).__name__}: {str(error)[:300]}")

    cost = measured(call)
    if error := cost.error():
        problems.append(error)
    outcome.counts[kind] += 1
    outcome.failures.extend(f"seed {seed}, {kind}: {problem}" for problem in problems)
    worst = outcome.worst.get(kind, Cost(0, 0.0))
    outcome.worst[kind] = Cost(max(worst.nbytes, cost.nbytes), max(worst.seconds, cost.seconds))


def measured(call: Callable[[], None]) -> Cost:
    """Calls, and says by how much memory peaked (Linux; 0 elsewhere) and what CPU time it took.

    The kernel's figures, not Python's: tensors are not allocated by Python.
    """
    before, begun = _resident(reset=True), time.process_time()
    call()
    seconds = time.process_time() - begun
    return Cost(max(0, _resident(peak=True) - before), seconds)


def _resident(*, peak: bool = False, reset: bool = False) -> int:
    status = Path("/proc/self/status")
    if not status.exists():
        return 0
    if reset:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    name = "VmHWM:" if peak else "VmRSS:"
    line = next(line for line in status.read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) << 10
