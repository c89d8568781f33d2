"""Prints ``commhooks schemes``: a table of all schemes, or a page on each of some."""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from commhooks import Scheme, Simulation, scheme_names
from commhooks.cli._arguments import made, settings_of, split
from commhooks.cli._table import print_table
from commhooks.core._registry import factory_of, options_of
from commhooks.core._scheme import slots_of
from commhooks.predict._ladder import ladder_lines
from commhooks.research.trace import bits_per_entry
from commhooks.wrappers._make import WRAPPER_OPTIONS

__all__ = ["one_thread", "schemes"]

_LATE = 10**6  # a step after the warm-up of every scheme with default settings
# The columns of the table, and the width of a terminal from which on each is shown.
_COLUMNS = {
    "name": 0,
    "class": 96,
    "collectives\nper bucket": 76,
    "biased": 0,
    "state per\nparameter": 0,
    "own\nscale": 76,
    "bits per\nentry": 0,
}
_RANKS, _SIDE = 4, 512  # bits are counted on a square matrix of this side
# In the order in which to try them, in groups; all others come last.
_ORDER = (
    ("none", "allreduce"),
    ("bf16", "fp16"),
    ("int8", "int4", "fp8", "onebit", "eden", "sdp4bit"),
    ("powersgd", "acpsgd", "batched_powersgd"),
    ("topk", "random_k"),
    ("dgc", "demo", "onebit_adam", "signsgd"),
    ("gossip", "noop"),
)
_FIRST = "int8"  # on most networks, see the ladder


def schemes(which: Sequence[str]) -> None:
    """Prints a table of all schemes, or of those of files; or a page on each that is named."""
    named, yours = split(which)
    console = Console()
    with one_thread():
        for name in named:
            _print_page(console, name)
        if yours:
            print_table(console, _listed(console.width, yours))
        elif not named:
            print_table(console, _listed(console.width))
            print("\nBegin with, by the network between ranks:")
            print(*(f"  {line}" for line in ladder_lines()), sep="\n")


@contextmanager
def one_thread() -> Iterator[None]:
    """Limits torch to one thread inside the ``with`` block.

    The buckets here are small: handing parts to threads takes longer than the work, above all on a
    machine where other processes run.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


# ---- all schemes


def _listed(width: int, yours: Sequence[str] = ()) -> Table:
    """Lists schemes.

    Args:
        width: of the terminal.
        yours: schemes of the user's files; none: all that are registered.
    """
    table = Table(title="schemes", caption_justify="left")
    shown = [column for column, least in _COLUMNS.items() if width >= least]
    for column in shown:
        table.add_column(column, no_wrap=True)
    names = scheme_names()
    known = [name for group in _ORDER for name in group]
    unlisted = [name for name in names if name not in known]
    for group in [yours] if yours else [*_ORDER, unlisted]:
        for name in (name for name in group if yours or name in names):
            mark = " <- begin here" if name == _FIRST else ""
            row = {"name": name + mark, **_facts_of(name)}
            cells = [escape(row.get(column.partition("\n")[0], "")) for column in shown]
            table.add_row(*cells, style="bold" if mark else None)
        table.add_section()
    order = "" if yours else "in groups, in the order in which to try them\n"
    table.caption = (
        f"{order}"
        "state: kept between steps, such as a residual\n"
        "own scale: a small parameter is as exact as a large one\n"
        "bits: per gradient entry of an all-reduce of as many bytes, on\n"
        f"{_RANKS} ranks; the payload of an all-gather counts n / 2 times on\n"
        "n ranks. After start_step and first steps that are sent\n"
        "uncompressed. More: commhooks schemes NAME"
    )
    return table


def _facts_of(name: str) -> dict[str, str]:
    try:
        scheme, bare = made(name), made(name, error_feedback=False)
    except typer.BadParameter:  # a user's scheme that needs options, or does not work
        return {"class": f"see commhooks schemes {name}"}
    return {
        "class": type(bare).__name__,
        "collectives": str(scheme.traits.rounds),
        # Without feedback: around a biased scheme, feedback makes the whole exact over steps.
        "biased": "yes" if bare.traits.biased else "",
        "state per": "yes" if slots_of(scheme) else "",
        "own": "yes" if scheme.traits.per_parameter else "",
        "bits per": _bits(scheme),
    }


def _bits(scheme: Scheme) -> str:
    try:
        return f"{_sent(scheme).bits:.3g}"
    except Exception as error:  # raised by a user's scheme: the other rows are still printed
        return f"fails: {type(error).__name__}"


@dataclass(frozen=True)
class _Sent:
    """Holds what a rank sends in a step after all warm-ups: collectives, bits per entry."""

    collectives: list[str]
    bits: float


def _sent(scheme: Scheme) -> _Sent:
    """Counts the collectives and bits that one rank sends per step."""
    ranks = Simulation(scheme, {"weight": (_SIDE, _SIDE)}, world_size=_RANKS)
    for engine in ranks.engines:
        engine.step = _LATE
    # Two steps, since ACP-SGD sends its two factors in turn; after two others, in which schemes
    # that send their first step dense (a scale of past steps) do so.
    for step in range(4):
        if step == 2:
            ranks.requests.clear()
            ranks.wire_bytes.clear()
        ranks.step([torch.randn(_SIDE * _SIDE) for _ in range(_RANKS)])
    collectives = [name for name, _ in ranks.requests]
    return _Sent(collectives[: len(collectives) // 2], bits_per_entry(ranks, 2 * _SIDE**2))


# ---- a page on one scheme

# The options that ``make`` adds to those of any scheme: default (None: depends on the scheme), and
# meaning.
_WRAPPERS = {
    "start_step": (0, "sends uncompressed gradients before that step"),
    "error_feedback": (None, "keeps what was not sent, and adds it to the next gradient"),
    "wire_dtype": (None, '"fp16" or "bf16": sends floating-point payloads in that type'),
    "coalesce": (False, "exchanges all buckets of a step at once"),
}


def _print_page(console: Console, word: str) -> None:
    """Describes a scheme: a sentence, what it sends, a row for each option, an example."""
    name, given = settings_of(word)
    factory = factory_of(name)
    try:
        options = options_of(factory) or {}
    except TypeError as error:  # a user's class that is no dataclass
        raise typer.BadParameter(f"{name}: {error}") from error
    empty = inspect.Parameter.empty
    needed = [key for key, value in options.items() if value is empty and key not in given]
    text = inspect.getdoc(factory) or ""
    summary = _plain(text.partition("\n\n")[0])
    sending = _sending(word, needed)
    table = _options(factory, options, text, feedback=not needed and _feeds_back(word))
    console.print(Text(f"{name}: {summary}" if summary else name, style="bold"))
    console.print(Text(f"sends: {sending}"))
    print_table(console, table)
    console.print("example:")
    example = Text("\n".join(_example(name, text, options, needed, given)))
    console.print(Padding(example, (0, 0, 1, 2)))


def _sending(word: str, needed: Sequence[str]) -> str:
    if needed:
        return f"depends on {', '.join(needed)}"
    try:
        sent = _sent(made(word))
    except typer.BadParameter:
        raise
    except Exception as error:  # raised by a user's scheme: its options are still printed
        return f"fails: {type(error).__name__}: {error}"
    if not sent.collectives:
        return "nothing"
    kinds = dict.fromkeys(sent.collectives)
    counts = [f"{sent.collectives.count(kind)} x {kind}" for kind in kinds]
    options = "these options" if ":" in word else "default options"
    return (
        f"{', '.join(counts)} per bucket; {sent.bits:.3g} bits per entry, where float32 has 32 "
        f"(a matrix of {_SIDE} x {_SIDE} on {_RANKS} ranks, {options}, after start_step and "
        f"first steps that are sent uncompressed)"
    )


def _feeds_back(word: str) -> bool:
    """Whether ``make`` puts feedback around the scheme by default."""
    return made(word) != made(word, error_feedback=False)


def _options(factory: Any, options: Mapping[str, Any], text: str, *, feedback: bool) -> Table:
    table = Table(expand=True)
    table.add_column("option", no_wrap=True)
    table.add_column("type", overflow="fold", max_width=16)
    table.add_column("default", overflow="fold")
    table.add_column("meaning", overflow="fold", ratio=1)
    meanings, kinds = _arguments(text), _kinds(factory)
    for option, default in options.items():
        shown = "needed" if default is inspect.Parameter.empty else repr(default)
        row = (option, kinds.get(option, ""), shown, meanings.get(option, ""))
        table.add_row(*map(escape, row))  # rich takes [brackets] for markup
    for option, (default, meaning) in _WRAPPERS.items():
        value = feedback if option == "error_feedback" else default
        table.add_row(option, _kind(WRAPPER_OPTIONS[option]), repr(value), meaning)
    return table


def _kinds(factory: Any) -> dict[str, str]:
    """Reads the type of each option; an annotation that cannot be looked up stays as written."""
    try:
        hints = typing.get_type_hints(factory)
    except Exception:  # a user's file may import names under TYPE_CHECKING only
        hints = inspect.get_annotations(factory)
    return {name: _kind(hint) for name, hint in hints.items()}


def _kind(hint: Any) -> str:
    """Returns the name of a type as a user would write it."""
    if typing.get_origin(hint) is typing.Literal:
        return " | ".join(map(repr, typing.get_args(hint)))
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " | ".join(map(_kind, typing.get_args(hint)))
    if hint is type(None):
        return "None"
    return hint.__name__ if isinstance(hint, type) else str(hint)


def _example(
    name: str,
    text: str,
    options: Mapping[str, Any],
    needed: Sequence[str],
    chosen: Mapping[str, Any],
) -> Sequence[str]:
    """Returns the docstring's example if it makes the scheme by name; else one with an option.

    Args:
        chosen: options that were given, which the example has instead.
    """
    _, _, rest = text.partition("\nExample:\n")
    lines = [line.strip()[4:] for line in rest.partition("\n\n")[0].splitlines()]
    # An example with the class, or with another name of the same class, says nothing on this name.
    if not chosen and any(f'"{name}"' in line for line in lines):
        return [re.sub(r"\b(?<!\.)register\(", "commhooks.register(", line) for line in lines]
    usual = [f"{key}={value!r}" for key, value in options.items() if value is not None][:1]
    given = [f"{key}={value!r}" for key, value in chosen.items()]
    given = [*(f"{option}=..." for option in needed), *given] or usual
    arguments = ", ".join(["ddp_model", f'"{name}"', *given])
    return [f"hook = commhooks.register({arguments})".replace("'", '"')]


def _arguments(text: str) -> dict[str, str]:
    """Reads the meaning of each argument from a docstring; ``a, b: ...`` is the meaning of both."""
    _, _, rest = text.partition("\nArgs:\n")
    meanings: dict[str, str] = {}
    last: list[str] = []
    for line in rest.splitlines():
        if not line.strip() or not line.startswith(" "):
            break
        match = re.fullmatch(r" {4}(\w[\w, ]*): (.*)", line)
        if match:
            last = match[1].split(", ")
            meanings |= dict.fromkeys(last, _plain(match[2]))
        else:  # a further line of the same meaning
            meanings |= {name: f"{meanings[name]} {_plain(line.strip())}" for name in last}
    return meanings


def _plain(text: str) -> str:
    """Removes the markup of docstrings, and line breaks."""
    text = re.sub(r":\w+:`(.*?)`", r"\1", text)
    return " ".join(text.replace("`", "").split())
