"""Schemes in the modes of both classes of DistributedDataParallel obey the laws of the fuzzer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.fuzz.case import Case
from tests.fuzz.runner import Runner
from tests.fuzz.schemes import SCHEMES as NAMED

pytestmark = pytest.mark.distributed

UNUSED = {"find_unused_parameters": True}
SKIPS = {**UNUSED, "skip_all_reduce_unused_params": True}
STATIC, VIEW = {"static_graph": True}, {"gradient_as_bucket_view": True}
MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "unused by rank": {"model": ("branches",), "use": "ranks", "ddp": UNUSED},
    "unused": {"model": ("front",), "use": "alternate", "ddp": UNUSED},
    "unused, zeros": {"model": ("front",), "use": "alternate", "ddp": UNUSED, "zero": "zeros"},
    "unused, view": {
        "model": ("branches",), "use": "alternate", "ddp": {**UNUSED, **VIEW}, "zero": "zeros",
    },
    "raised": {  # a step that has raised is over, so that it can be saved
        "events": ((2, "raise", "middle"), (3, "save"), (4, "raise", "last"), (5, "save")),
        "steps": 7,
    },
    "last bucket skipped": {"model": ("front",), "use": "once", "ddp": SKIPS},
    "first bucket skipped": {"model": ("branches",), "use": "once", "ddp": SKIPS},
    "static graph": {"ddp": STATIC},
    "static graph of two dtypes": {"ddp": STATIC, "model": ("f64",)},
    "static graph, never used": {"ddp": STATIC, "model": ("never",)},
    "inner backward": {"ddp": STATIC, "model": ("reentrant", "twice")},
    "inner backward first": {"model": ("reentrant",)},
    "view": {"ddp": VIEW},
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
}  # fmt: skip
SCHEMES: dict[str, dict[str, Any]] = {
    **{name: {"scheme": name} for name in NAMED if name != "noop"},
    "powersgd, late": {"scheme": "powersgd", "options": {"start_step": 3}},
    "powersgd, fp16": {"scheme": "powersgd", "options": {"wire_dtype": "fp16"}},
    "powersgd, coalesced": {"scheme": "powersgd", "options": {"coalesce": True}},
    "topk, coalesced": {"scheme": "topk", "options": {"coalesce": True}},
    "fp16, feedback": {"scheme": "fp16", "options": {"error_feedback": True}},
    "bf16, float32 sums": {"scheme": "bf16", "options": {"fp32_sum": True}},
}
# They travel in ways of their own; the others meet some modes: views of buckets, 16 bits, join.
SOME = ("none", "fp16", "powersgd", "batched_powersgd", "int8", "onebit", "topk, coalesced")
THOROUGH = ("no_sync, view", "half", "join")


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    runner = Runner()
    yield runner
    runner.restart()


CASES = [(mode, host) for host in ("core", "torch") for mode in MODES]
CASES.remove(("raised", "torch"))  # it ends there, see tests/hook/test_steps.py


@pytest.mark.parametrize(("mode", "host"), CASES)
def test_schemes_obey_the_laws_in_every_mode(mode: str, host: str, runner: Runner) -> None:
    for name in SCHEMES if mode in THOROUGH else SOME:
        options = {"bucket_cap_mb": 0.0005, **MODES[mode].get("ddp", {})}
        verdict = runner.run(Case(**{"host": host, **MODES[mode], **SCHEMES[name], "ddp": options}))
        assert verdict.status == "ok", (name, verdict)
