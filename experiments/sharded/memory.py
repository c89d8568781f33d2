"""Compares the memory that schemes take in FSDP2 with the formula of ``docs/integrations/fsdp.md``.

Run ``python -m experiments.sharded memory``. Every case runs in fresh processes, whose allocations
are counted one by one (``live_bytes.cpp``): what is alive between two steps beyond FSDP2 without a
hook, and the most that is alive while a module's gradients are reduced beyond what was before.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import pandas as pd
import torch
import typer
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import commhooks
from commhooks.core._packed import PackedCodec
from commhooks.core._scheme import Scheme, slots_of, walk
from commhooks.wrappers import AveragedFeedback, ErrorFeedback
from experiments.tools.processes import Send, run_ranks
from experiments.tools.tasks import CharTransformer

__all__ = ["SCHEMES", "Memory", "formula"]

NATIVE = "FSDP2"
_STEPS = 5  # the last is measured: buffers of two steps are there
_PLAIN = commhooks.make("int4", error_feedback=False)
SCHEMES: dict[str, Scheme] = {
    "int8": commhooks.make("int8"),
    "int4": _PLAIN,
    "int4, feedback": ErrorFeedback(_PLAIN),
    "int4, 8-bit feedback": AveragedFeedback(_PLAIN),
}


class Memory(NamedTuple):
    """Holds bytes of one rank: kept between steps, and needed while a module is reduced."""

    kept: float
    scratch: float


def formula(scheme: Scheme, modules: Sequence[Sequence[int]], ranks: int) -> Memory:
    """Returns the memory of a scheme in FSDP2, on a CPU.

    Args:
        scheme: a packed codec, with or without feedback.
        modules: number of entries of a rank's piece of each parameter, filled up, by module.
        ranks: over which parameters are sharded.
    """
    (codec,) = (part for part in walk(scheme) if isinstance(part, PackedCodec))
    entries = [ranks * sum(pieces) for pieces in modules]
    # What is sent to all ranks, and what comes from them.
    rows = [codec.segments([pieces] * ranks) for pieces in modules]
    scratch = [2.0 * ranks * codec.row_bytes(row) for row in rows if row is not None]
    kept = 0.0
    for slot in slots_of(scheme):
        for pieces in modules:
            for piece in pieces:
                shape = torch.Size(slot.shape(torch.Size([piece])) or ())
                # Twice: the values of the last step, and room for those of the next.
                kept += 2 * ranks * shape.numel() * (slot.dtype or torch.float32).itemsize
    if isinstance(scheme, AveragedFeedback):  # the memory in 32 bits, and what was not sent
        scratch = [nbytes + 8.0 * n for nbytes, n in zip(scratch, entries, strict=True)]
    return Memory(kept, max(scratch))


class _Counter:
    """Reads the counters of ``live_bytes.cpp``, which was loaded before the C library."""

    def __init__(self) -> None:
        self._library: Any = ctypes.CDLL(None)
        for name in ("live_bytes", "most_live_bytes"):
            getattr(self._library, name).restype = ctypes.c_longlong
        self._before = 0

    def live(self) -> int:
        return int(self._library.live_bytes())

    def most(self) -> int:
        return int(self._library.most_live_bytes())

    def begin(self) -> int:
        """Resets the maximum; returns the bytes that are alive."""
        self._before = max(self._before, self.most())
        self._library.forget_most()
        return self.live()

    def peak(self) -> int:
        """Returns the maximum since the last call."""
        peak, self._before = max(self._before, self.most()), 0
        self._library.forget_most()
        return peak


def _run_rank(rank: int, world_size: int, send: Send, name: str, width: int, depth: int) -> None:
    counter = _Counter()
    torch.manual_seed(0)
    model: Any = CharTransformer(64, width, depth)
    mesh = init_device_mesh("cpu", (world_size,))
    for module in [*model.blocks, model]:
        fully_shard(module, mesh=mesh)
    scratch: list[int] = []
    groups = [module._get_fsdp_state()._fsdp_param_groups[0] for module in [*model.blocks, model]]
    modules = [
        [parameter.padded_sharded_param_size.numel() for parameter in group.fsdp_params]
        for group in groups
    ]
    if name != NATIVE:
        commhooks.register(model, SCHEMES[name])
    for group in groups:
        _measure(group, counter, scratch)
    tokens = torch.randint(0, 128, (2, 64), generator=torch.Generator().manual_seed(1))
    peak = kept = 0
    for _ in range(_STEPS):
        scratch.clear()
        counter.peak()
        model(tokens).square().mean().backward()
        peak = counter.peak()
        model.zero_grad()
        kept = counter.live()
    if rank == 0:
        send({"modules": modules, "kept": kept, "scratch": max(scratch), "peak": peak})


def _measure(group: Any, counter: _Counter, scratch: list[int]) -> None:
    """Records what each call of a module's reduce-scatter allocates."""
    inner = group._reduce_scatter_comm

    class Measured(type(inner)):  # type: ignore[misc]
        def __call__(self, *arguments: Any, **named: Any) -> Any:
            before = counter.begin()
            try:
                return super().__call__(*arguments, **named)
            finally:
                scratch.append(counter.most() - before)

    # The class and not the object: a hook looks whether its own object is there still.
    inner.__class__ = Measured


def _built(folder: str) -> str:
    """Compiles the counter and returns its path."""
    source, library = Path(__file__).with_name("live_bytes.cpp"), Path(folder, "live_bytes.so")
    flags = ["-O2", "-std=c++17", "-shared", "-fPIC"]
    subprocess.run(["g++", *flags, str(source), "-o", str(library)], check=True)
    return str(library)


def main(
    widths: Annotated[str, typer.Option(help="Of the transformer, comma-separated.")] = "256,512",
    depth: Annotated[int, typer.Option(help="Of the transformer.")] = 4,
    ranks: Annotated[int, typer.Option(help="Number of processes.")] = 4,
    out: Annotated[Path, typer.Option(help="The table.")] = Path("results/sharded/memory.csv"),
) -> None:
    """Prints measured and computed memory of one rank."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LD_PRELOAD"] = _built(folder)
        for width in map(int, widths.split(",")):
            by_name = {}
            for name in (NATIVE, *SCHEMES):
                (by_name[name],) = run_ranks(_run_rank, ranks, name, width, depth)
            rows += _rows(by_name, ranks, width=width, ranks=ranks)
        del os.environ["LD_PRELOAD"]
    out.parent.mkdir(parents=True, exist_ok=True)
    frame = pd.DataFrame(rows)
    frame.to_csv(out, index=False, float_format="%.5g")
    table = Table(*frame.columns)
    for row in rows:
        values = (f"{value:.4g}" if isinstance(value, float) else value for value in row.values())
        table.add_row(*map(str, values))
    Console(width=160).print(table)


def _rows(by_name: dict[str, Any], count: int, **where: Any) -> list[dict[str, Any]]:
    native = by_name[NATIVE]
    rows = []
    for name in SCHEMES:
        measured, wanted = by_name[name], formula(SCHEMES[name], native["modules"], count)
        kept = measured["kept"] - native["kept"]
        rows.append(
            {
                **where,
                "case": name,
                "entries": count * sum(map(sum, native["modules"])),
                "kept_mb": kept / 1e6,
                "kept_formula_mb": wanted.kept / 1e6,
                "scratch_mb": measured["scratch"] / 1e6,
                "scratch_formula_mb": wanted.scratch / 1e6,
                "both_over_formula": (kept + measured["scratch"]) / sum(wanted),
                "step_peak_mb": measured["peak"] / 1e6,
                "step_peak_fsdp2_mb": native["peak"] / 1e6,
            }
        )
    return rows
