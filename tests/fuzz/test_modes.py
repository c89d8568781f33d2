"""Schemes obey the laws of the fuzzer in the modes of DistributedDataParallel and on every host."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from tests.fuzz.case import Case
from tests.fuzz.hosts import HOSTS
from tests.fuzz.runner import Runner
from tests.fuzz.schemes import SCHEMES as NAMED
from tests.fuzz.schemes import build

pytestmark = pytest.mark.distributed

UNUSED = {"find_unused_parameters": True}
SKIPS = {**UNUSED, "skip_all_reduce_unused_params": True}
STATIC, VIEW = {"static_graph": True}, {"gradient_as_bucket_view": True}
# A step that has raised is over, so that it can be saved.
RAISED: dict[str, Any] = {
    "events": ((2, "raise", "middle"), (3, "save"), (4, "raise", "last"), (5, "save")),
    "steps": 7,
}
RESUMED: dict[str, Any] = {"events": ((2, "resume", "torch"), (4, "resume", "flat")), "steps": 7}
HOLD: dict[str, Any] = {"setting": ("hold",), "micro": 2}
MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "unused by rank": {"model": ("branches",), "use": "ranks", "ddp": UNUSED},
    "unused": {"model": ("front",), "use": "alternate", "ddp": UNUSED},
    "unused, zeros": {"model": ("front",), "use": "alternate", "ddp": UNUSED, "zero": "zeros"},
    "unused, view": {
        "model": ("branches",), "use": "alternate", "ddp": {**UNUSED, **VIEW}, "zero": "zeros",
    },
    "raised": RAISED,
    "raised, unused": {**RAISED, "ddp": UNUSED},
    "raised, static graph": {**RAISED, "ddp": STATIC},
    "raised, view": {**RAISED, "ddp": VIEW},
    "raised, no_sync": {
        **RAISED, "model": ("branches",), "use": "same", "micro": 2, "ddp": UNUSED,
    },
    "late": {"setting": ("late",)},
    "poison": {"events": ((1, "poison", "middle", "inf"), (3, "poison", "first", "nan"))},
    "unregistered": {"events": ((3, "unregister"),), "steps": 6},
    "hold": {**HOLD, "micro": 3},
    "hold, raised": {**RAISED, **HOLD},
    "hold, unused": {**HOLD, "model": ("branches",), "use": "alternate", "ddp": SKIPS},
    "hold, static graph": {**HOLD, "ddp": STATIC, "model": ("never",)},
    "hold, delayed": {**HOLD, "setting": ("hold", "delayed")},
    "hold, in backward": {**HOLD, "setting": ("hold", "in_backward")},
    "hold, compiled": {**HOLD, "setting": ("compiled", "hold")},
    "hold, join": {**HOLD, "join": 3, "steps": 8},
    "hold, precision": {**HOLD, "ddp": {"mixed_precision": "bf16_f32"}},
    "last bucket skipped": {"model": ("front",), "use": "once", "ddp": SKIPS},
    "first bucket skipped": {"model": ("branches",), "use": "once", "ddp": SKIPS},
    "static graph": {"ddp": STATIC},
    "static graph of two dtypes": {"ddp": STATIC, "model": ("f64",)},
    "static graph, never used": {"ddp": STATIC, "model": ("never",)},
    "inner backward": {"ddp": STATIC, "model": ("reentrant", "twice")},
    "inner backward first": {"model": ("reentrant",)},
    "view": {"ddp": VIEW},
    "compiled": {"setting": ("compiled",)},
    "no_sync": {"micro": 4},
    "no_sync, view": {"micro": 4, "ddp": VIEW},
    "sparse": {"model": ("sparse",)},
    "frozen": {"model": ("frozen",)},
    "channels last": {"model": ("conv",)},
    "half": {"model": ("f16",)},
    "bfloat16": {"model": ("all_bf16",)},
    "complex": {"model": ("complex",)},
    "three ranks, unused": {"world": 3, "model": ("branches",), "use": "ranks", "ddp": UNUSED},
    "three ranks, static graph": {"world": 3, "ddp": STATIC},
    "three ranks, no_sync": {"world": 3, "micro": 4},
    "three ranks, sparse": {"world": 3, "model": ("sparse",)},
    "join": {"join": 3, "steps": 8},
    "loaded": {"legs": (2,)},
    "resumed": RESUMED,
    "three ranks, resumed": {**RESUMED, "world": 3},
    "loaded on other ranks": {"legs": (3, 2, 1)},
}  # fmt: skip
SCHEMES: dict[str, dict[str, Any]] = {
    **{name: {"scheme": name} for name in NAMED if name != "noop"},
    "powersgd, late": {"scheme": "powersgd", "options": {"start_step": 3}},
    "powersgd, fp16": {"scheme": "powersgd", "options": {"wire_dtype": "fp16"}},
    "powersgd, coalesced": {"scheme": "powersgd", "options": {"coalesce": True}},
    "topk, coalesced": {"scheme": "topk", "options": {"coalesce": True}},
    "topk, cut": {"scheme": "topk", "wrap": ("cut",)},
    "fp16, feedback": {"scheme": "fp16", "options": {"error_feedback": True}},
    "qsgd, in two phases": {"scheme": "qsgd", "wrap": ("two_phase",)},
    "bf16, float32 sums": {"scheme": "bf16", "options": {"fp32_sum": True}},
}
# Schemes of each way to travel, which run in all modes. All others run, slowly, in the thorough
# modes: views of buckets, 16 bits, join, other ranks.
SOME = (
    *("none", "fp16", "powersgd", "batched_powersgd", "int8", "onebit"),
    *("topk, coalesced", "topk, cut"),
)
THOROUGH = (
    *("no_sync, view", "half", "join", "loaded on other ranks", "resumed", "three ranks, resumed"),
)
# Modes and hosts of every run; all others are marked slow.
QUICK = {
    *(("core", mode) for mode in ("plain", "raised", "hold, delayed", "static graph", "join")),
    *(("core", mode) for mode in ("hold, unused", "hold, static graph", "three ranks, unused")),
    ("core", "loaded on other ranks"),
    *(("torch", mode) for mode in ("unused, zeros", "half", "sparse", "poison")),
    *("fsdp2", "hsdp between", "collectives reduce_scatter", "group", "zero", "diloco"),
}


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    runner = Runner()
    yield runner
    runner.restart()


# Torch's class has no ``hold``, keeps its hook, and ends where a step raises.
CASES = [("core", mode) for mode in MODES] + [
    ("torch", mode) for mode in MODES if not mode.startswith(("raised", "hold", "unregistered"))
]
# A mode runs half of the schemes, in turn; runs of the others are marked slow.
HALF = {case: place % 2 for place, case in enumerate(CASES)}


@pytest.mark.parametrize(
    ("host", "mode"),
    [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in CASES],
)
def test_schemes_obey_the_laws_in_every_mode(host: str, mode: str, runner: Runner) -> None:
    obey(host, mode, SOME[HALF[host, mode] :: 2], runner)


@pytest.mark.slow
@pytest.mark.parametrize(("host", "mode"), CASES)
def test_other_schemes_obey_the_laws_in_every_mode(host: str, mode: str, runner: Runner) -> None:
    obey(host, mode, SOME[1 - HALF[host, mode] :: 2], runner)


@pytest.mark.slow
@pytest.mark.parametrize(("host", "mode"), [case for case in CASES if case[1] in THOROUGH])
def test_all_schemes_obey_the_laws_in_thorough_modes(host: str, mode: str, runner: Runner) -> None:
    obey(host, mode, SCHEMES.keys() - SOME, runner)


def obey(host: str, mode: str, schemes: Iterable[str], runner: Runner) -> None:
    for name in sorted(schemes):
        options = {"bucket_cap_mb": 0.0005, **MODES[mode].get("ddp", {})}
        verdict = runner.run(Case(**{"host": host, **MODES[mode], **SCHEMES[name], "ddp": options}))
        assert verdict.status == "ok", (name, verdict)


PLACES = {
    " ".join((host, *setting)): (host, setting)
    for host, kind in HOSTS.items()
    for setting in dict.fromkeys(kind.settings)
}
EVENTS = (
    *((1, "poison", "middle", "inf"), (2, "save"), (3, "poison", "first", "nan")),
    *((4, "switch", "int4", {"block": 64}), (5, "resume", "gathered")),
)


@pytest.mark.parametrize(
    "place",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in PLACES],
)
def test_schemes_obey_the_laws_on_every_host(place: str, runner: Runner) -> None:
    """A step that is not finite on one rank is counted, and changes no memory on any."""
    obey_on(place, ("none", "onebit", "topk", "powersgd"), runner)


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_more_schemes_obey_the_laws_on_every_host(place: str, runner: Runner) -> None:
    obey_on(place, ("int8", "int4"), runner)


def obey_on(place: str, schemes: Iterable[str], runner: Runner) -> None:
    host, setting = PLACES[place]
    kind = HOSTS[host]
    for name in schemes:
        if not kind.takes(build(name, {}, ()), setting):
            continue
        # Steps that are skipped are counted where nothing is loaded or switched.
        left_out = ("save", "switch") if name in ("int4", "topk") else ()
        events = [event for event in EVENTS if event[1] in kind.happens]
        world = 3 if 3 in kind.worlds else 4  # shards of uneven sizes
        model = tuple(name for name in ("frozen", "checkpoint") if name in kind.models)
        case = Case(
            host=host,
            setting=setting,
            world=world,
            scheme=name,
            model=model,
            steps=7,
            events=tuple(event for event in events if event[1] not in left_out),
        )
        verdict = runner.run(case)
        assert verdict.status == "ok", (name, verdict)
