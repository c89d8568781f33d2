"""What a reducer is told once, and what it knows of one step."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from ddp_core.reducer.accumulators import NO_BACKWARD
from ddp_core.reducer.launch import Outcome
from ddp_core.reducer.layout import BucketCaps
from ddp_core.reducer.timeline import StepTimes

__all__ = ["ReducerSettings", "Step"]


@dataclass
class ReducerSettings:
    """Says how a reducer works; see the arguments of DistributedDataParallel."""

    caps: BucketCaps
    find_unused: bool = False
    static_graph: bool = False
    as_view: bool = False
    skip_unused: bool = False
    dtype: torch.dtype | None = None  # of the buckets; the parameters' own by default


@dataclass(slots=True)
class Step:
    """Holds the facts of one synchronised step; the next one has a new one."""

    expecting: bool = False  # gradients are to be reduced
    is_open: bool = False  # a backward pass is under way, or has raised
    is_plain: bool = False  # an arrival is nothing but an arrival
    prepared_in: int = NO_BACKWARD  # the pass in which its forward ran (activation checkpointing)
    recomputed_in: int = NO_BACKWARD  # the pass in which its forward ran once more
    was_nested: bool = False  # it ended with a reentrant pass within another
    complete: bool = True  # all gradients were reduced, or none is to be
    marked: list[int] = field(default_factory=list)  # parameters that count as arrived, in order
    unused: list[int] = field(default_factory=list)  # those that backward does not come to
    unused_marked: bool = False
    unused_known: bool = True  # the ranks will have told each other, where anybody asks
    used: bytearray = field(default_factory=bytearray)  # here, by parameter, once it has landed
    calls: list[int] = field(default_factory=list)  # of the hooks (static graph), to come
    called: list[int] = field(default_factory=list)  # parameters by call, where a graph is learned
    needed: list[bool] | None = None  # buckets that a rank needs; None: all are sent
    scale: float | None = None  # of gradients that go into a bucket; None: the hook scales
    divisor: int = 0  # not known yet
    launched: int = 0  # buckets
    finished: int = 0  # buckets
    outcomes: list[Outcome] = field(default_factory=list)
    left_alone: list[nn.Parameter] = field(default_factory=list)  # no rank uses them
    abandoned: bool = False  # the hook's state was told so
    times: StepTimes | None = None
