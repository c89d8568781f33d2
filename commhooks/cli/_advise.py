"""Runs ``commhooks advise``: predicts candidates with every bucket size and recommends two."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from commhooks.cli._arguments import (
    check_folders,
    heading,
    listed,
    note_of,
    schemes_of,
    settings_of,
    short,
    workload_of,
)
from commhooks.cli._table import print_table
from commhooks.predict._advise import CANDIDATES, MARGIN, SAFE_ERROR, Option, advise, best_of
from commhooks.predict._device import DEFAULT_DEVICE
from commhooks.predict._device import device as device_of
from commhooks.predict._fabric import fabric as fabric_of
from commhooks.predict._ladder import LADDER
from commhooks.predict._quality import gap_of
from commhooks.predict._workload import Workload
from commhooks.wrappers._feedback import has_feedback

__all__ = ["CANDIDATES", "advise_on"]

_MOST_TIMES = 20  # as long as computing alone: what is longer is not written as a ratio
_ABOUT = 1.1  # times as long as the fastest: predictions claim a tenth
_WORTH_A_TRIAL = 0.1  # share of the step that an unproved scheme has to save to be named
_TIMES = ("step_s", "exposed_s", "wire_s", "codec_s")
_COUNTS = ("payload_nbytes", "wire_nbytes", "rounds")


def advise_on(
    *,
    model: str | None,
    timeline: Path | None,
    fabric: str,
    ranks: int,
    schemes: str,
    max_error: float,
    device: str | None,
    batch: int | None,
    accumulate: int,
    out: Path | None,
) -> None:
    """Prints the fastest options, what to begin with, and what is faster.

    Args:
        model, timeline: see :class:`commhooks.cli._simulate.Options`, as for the others.
        ranks: number of ranks.
        max_error: largest relative squared error of an exchange.
        out: file for all predictions.

    Raises:
        typer.BadParameter: an argument is wrong.
    """
    check_folders(out)
    try:
        computing, links = device_of(device or DEFAULT_DEVICE), fabric_of(fabric)
        workload, samples = workload_of(model, timeline, batch, computing, accumulate=accumulate)
        candidates = schemes_of(listed("--schemes", schemes))
        every = advise(
            workload,
            ranks=ranks,
            fabric=links,
            device=computing,
            candidates=candidates,
            max_error=math.inf,
        )
    except ValueError as wrong:
        raise typer.BadParameter(str(wrong)) from wrong
    console = Console(markup=False)  # names come from files
    default = "" if device else f" (--device {DEFAULT_DEVICE} is the default)"
    where = f"{ranks:,} x {computing.name}{default} over {links.name}"
    console.print(f"{heading(workload, samples, where)}\n", highlight=False)
    # The fastest options, and the best of them.
    options = _within(every, max_error)
    beyond = [option for option in every if option not in options]
    print_table(console, _table(options, beyond, max_error))
    best = best_of(options)
    safe = best_of(_within(options, min(SAFE_ERROR, max_error)))
    proved = best_of([option for option in options if _keeps_quality(option)])
    answers = _advice(safe, proved, best, options, workload)
    for text in (_by_size(safe, options), *answers):
        console.print(text, highlight=False, soft_wrap=True)
    # Gains of a larger error, and a note on the link.
    faster = [option for option in beyond if _saves(option, best)]
    if faster:
        closing = _beyond(_usual(faster), max_error)
        console.print(closing, highlight=False, soft_wrap=True)
    if note := note_of(links, ranks):
        console.print(f"\n{note}", highlight=False, soft_wrap=True)
    if out is not None:
        _write([*options, *beyond], out)
        typer.echo(f"wrote {out}")


def _within(options: Sequence[Option], error: float) -> list[Option]:
    """Returns the options of at most an error, and those that do not compress by a scheme."""
    return [
        option for option in options if option.error <= error or option.name in ("none", "bf16")
    ]


def _fastest(options: Sequence[Option]) -> list[Option]:
    """Returns each scheme with its best bucket size, the fastest first."""
    by_name: dict[str, Option] = {}
    for option in options:
        by_name.setdefault(option.name, option)
    return list(by_name.values())


def _bf16(options: Sequence[Option]) -> float:
    return next(option.step.step_s for option in options if option.name == "bf16")


def _table(options: Sequence[Option], beyond: Sequence[Option], max_error: float) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 0, 0, 1))
    table.add_column("scheme", no_wrap=True)
    for column in (
        "buckets|[MiB]",
        "step|[ms]",
        "exposed|[ms]",
        "speed-up|",
        "error|",
        "loss over|bf16's",
    ):
        table.add_column(column.replace("|", "\n"), justify="right", no_wrap=True)
    for group in (options, beyond):
        for option in _fastest(group):
            gap = gap_of(option.scheme)
            table.add_row(
                option.name,
                f"{option.cap_mb:g}",
                short(1e3 * option.step.step_s),
                short(1e3 * option.step.exposed_s),
                f"{_bf16(options) / option.step.step_s:.2f}",
                f"{option.error:.{2 if option.error > 0.1 else 1}g}",
                "" if gap is None else str(gap),
            )
        table.add_section()
    table.caption = (
        "exposed: not overlapped with backward. speed-up: over bf16. "
        "error: relative squared error of one exchange of normal entries"
        + (f"; below the line: over {max_error:g}. " if beyond else ". ")
        + "loss: as measured after training a small transformer, a 95 % interval "
        "(powersgd: start_step=10)."
    )
    table.caption_justify = "left"
    return table


def _sizes(name: str, options: Sequence[Option]) -> list[Option]:
    """Returns the options of a scheme by bucket size."""
    sizes = [option for option in options if option.name == name]
    return sorted(sizes, key=lambda option: option.cap_mb)


def _by_size(option: Option, options: Sequence[Option]) -> str:
    sizes = _sizes(option.name, options)
    if not _size_matters(option, options):
        return (
            f"\n{option.name} by bucket size: {sizes[0].cap_mb:g} to {sizes[-1].cap_mb:g} MiB "
            f"take the same time, within {100 * MARGIN:.0f} %"
        )
    listed = ", ".join(f"{each.cap_mb:g} MiB {short(1e3 * each.step.step_s)} ms" for each in sizes)
    return f"\n{option.name} by bucket size: {listed}"


def _size_matters(option: Option, options: Sequence[Option]) -> bool:
    """Returns whether the bucket size changes the time of a step by more than the margin."""
    steps = [each.step.step_s for each in _sizes(option.name, options)]
    return max(steps) > (1 + MARGIN) * min(steps)


def _named(option: Option, options: Sequence[Option]) -> str:
    """Returns the scheme, and the bucket size where that matters."""
    return str(option) if _size_matters(option, options) else option.name


def _keeps_quality(option: Option) -> bool:
    """Whether an option keeps the quality of bf16 as measured, or else by its error."""
    gap = gap_of(option.scheme)
    return option.error <= SAFE_ERROR if gap is None else gap.is_proved


def _advice(
    safe: Option, proved: Option, best: Option, options: Sequence[Option], workload: Workload
) -> Iterator[str]:
    """Yields what to begin with, what is faster, and the lines of Python that follow from each.

    Args:
        safe: the best option whose error is small.
        proved: the best option that keeps the quality of bf16.
        best: the best option within the budget of error.
    """
    if best.name == "none":
        yield (
            f"\nDo not compress: no scheme within the budget saves {100 * MARGIN:.0f} % of the "
            f"{_times(best, options, workload)}."
        )
        yield _wrapped(best, options)
        return
    yield f"\nBegin with {_named(safe, options)}: {_times(safe, options, workload)}."
    yield _wrapped(safe, options)
    begin, word = safe, "Faster"
    if _saves(proved, safe):
        yield (
            f"\nFaster: {_named(proved, options)}: {_times(proved, options, workload)}."
            f"{_measured(proved)}"
        )
        yield _wrapped(proved, options)
        begin, word = proved, "Faster still"
    if _saves(best, begin, _WORTH_A_TRIAL):
        yield (
            f"\n{word}: {_named(best, options)}: "
            f"{_times(best, options, workload)}. Its error of {best.error:.2g} is {_later(best)}."
            f"{_measured(best)} Compare the loss with that of {safe.name}."
        )
        yield _wrapped(best, options)


def _saves(option: Option, over: Option, share: float = MARGIN) -> bool:
    """Returns whether the step with an option is shorter by more than a share."""
    return option.step.step_s < (1 - share) * over.step.step_s


def _measured(option: Option) -> str:
    """Returns a further sentence with what the study of quality measured of a scheme; or ""."""
    gap = gap_of(option.scheme)
    if gap is None:
        return ""
    facts = ", ".join(filter(None, ("95 %", gap.counted, gap.dense)))
    return f" Its loss over bf16's after training a small transformer: {gap} ({facts})."


def _times(option: Option, options: Sequence[Option], workload: Workload) -> str:
    """Returns the step as milliseconds, over that with bf16, and over computing alone.

    The last is left out where computing is next to nothing.
    """
    parts = [f"{short(1e3 * option.step.step_s)} ms per step"]
    if option.name not in ("none", "bf16"):
        parts.append(f"{_bf16(options) / option.step.step_s:.2f} times as fast as bf16")
    times = option.step.step_s / workload.compute_s
    if times < 2:
        parts.append(f"{100 * (times - 1):.0f} % longer than computing alone")
    elif times < _MOST_TIMES:
        parts.append(f"{times:.1f} times as long as computing alone")
    return ", ".join(parts)


def _wrapped(option: Option, options: Sequence[Option]) -> str:
    """Returns the lines of Python that take an option."""
    size = f", bucket_cap_mb={option.cap_mb:g}" if _size_matters(option, options) else ""
    lines = f"    model = DistributedDataParallel(module{size})"
    if option.name == "none":
        return lines
    hook = f"    hook = commhooks.register(model, {_arguments(option.name)})".replace("'", '"')
    return f"{lines}\n{hook}"


def _later(option: Option) -> str:
    if has_feedback(option.scheme):
        return "sent in later steps by feedback"
    if option.scheme.traits.biased:
        return "lost, without error feedback"
    return "unbiased, so that it averages out over ranks and steps"


def _arguments(text: str) -> str:
    """Returns a scheme with options, such as "powersgd:rank=4", as the arguments of a call."""
    name, settings = settings_of(text)
    return ", ".join([repr(name), *(f"{key}={value!r}" for key, value in settings.items())])


def _usual(faster: Sequence[Option]) -> Option:
    """Returns the fastest option; one of the ladder if that is about as fast."""
    near = [option for option in faster if option.step.step_s <= _ABOUT * faster[0].step.step_s]
    of_ladder = {scheme for rung in LADDER for scheme in (rung.first, rung.then)}
    return next((option for option in near if option.name in of_ladder), faster[0])


def _beyond(option: Option, max_error: float) -> str:
    return (
        f"\n{option.name} would take {short(1e3 * option.step.step_s)} ms. Its error of "
        f"{option.error:.2g} is above {max_error:g}; it is {_later(option)}, and whether the model "
        f"still learns has to be tried.{_measured(option)}"
    )


def _write(options: Sequence[Option], path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("scheme", "bucket_cap_mb", "error", *_TIMES, *_COUNTS))
        for option in options:
            times = [f"{getattr(option.step, name):.6g}" for name in _TIMES]
            counts = [f"{getattr(option.step, name):.0f}" for name in _COUNTS]
            writer.writerow((option.name, option.cap_mb, f"{option.error:.4g}", *times, *counts))
