"""Features two by two, each as a change of a plain case: ``python -m tests.fuzz.pairs`` runs all.

``--share 0.1``: some of them; ``--with NAME``: only pairs with that feature. Prints what is
refused, with the reason, and what is broken, with a line that runs it again.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
from collections.abc import Iterator
from dataclasses import fields
from itertools import combinations
from typing import Any

from tests.fuzz.case import Case
from tests.fuzz.laws import Verdict
from tests.fuzz.model import MODEL_FEATURES
from tests.fuzz.runner import Runner, each_on_a_runner
from tests.fuzz.schemes import OPTIONS, WRAPPERS

__all__ = ["ALONE", "APART", "FEATURES", "HOSTS", "TOGETHER", "UNRELIABLE", "case_of", "expected",
           "pairs", "run_pairs", "wrong"]  # fmt: skip

Pair = tuple[str, str, str]  # the host and two features
HOSTS = ("torch", "core")
# What pairs without a scheme run: two rounds, a residual for everything, so that the law of sums
# is at its sharpest.
PLAIN: dict[str, Any] = {"scheme": "onebit", "steps": 4}
# One of each kind; others differ in arithmetic only.
_SCHEMES = (
    *("none", "fp16", "powersgd", "acpsgd", "batched_powersgd", "int8", "int4", "topk"),
    *("random_k", "sdp4bit", "eden", "dgc", "demo", "onebit_adam", "signsgd", "noop"),
)
_UNUSED = {"find_unused_parameters": True}


def _events(*events: tuple[Any, ...], **more: Any) -> dict[str, Any]:
    return {"events": events, **more}


FEATURES: dict[str, dict[str, Any]] = {
    **{f"scheme {name}": {"scheme": name} for name in _SCHEMES},
    **{f"option {name}": {"options": {name: values[0]}} for name, values in OPTIONS.items()},
    **{f"wrap {name}": {"wrap": (name,)} for name in WRAPPERS if name != "two_phase"},
    "wrap two_phase": {"scheme": "qsgd", "wrap": ("two_phase",)},
    **{
        f"model {name}": {"model": (name,)}
        for name in MODEL_FEATURES
        if name not in ("branches", "front", "never", "extra", "buffer")
    },
    "unused by rank": {"model": ("branches",), "use": "ranks", "ddp": _UNUSED},
    "unused everywhere": {"model": ("front",), "use": "once", "ddp": _UNUSED},
    "never used": {"model": ("never",), "ddp": _UNUSED},
    "find_unused": {"ddp": _UNUSED},
    "skips unused": {
        "model": ("front",),
        "use": "same",
        "ddp": {**_UNUSED, "skip_all_reduce_unused_params": True},
    },
    "small buckets": {"ddp": {"bucket_cap_mb": 0.0005}},
    "static_graph": {"ddp": {"static_graph": True}},
    "view": {"ddp": {"gradient_as_bucket_view": True}},
    "buffers": {"model": ("buffer",)},
    "own buffers": {"model": ("buffer",), "ddp": {"broadcast_buffers": False}},
    "mixed precision": {"ddp": {"mixed_precision": "bf16_f32"}},
    **{
        f"setting {name}": {"setting": (name,)}
        for name in ("delayed", "group", "mesh", "ignored", "late", "in_backward", "compiled")
    },
    "hold": {"setting": ("hold",), "micro": 2},
    "layout scheme": {"setting": ("layout_scheme",)},
    "layout shape": {"setting": ("layout_shape",)},
    "part of the ranks": {"setting": ("part",), "world": 3},
    "three ranks": {"world": 3},
    "no_sync": {"micro": 2},
    "zero_grad to zeros": {"zero": "zeros"},
    "no zero_grad": {"zero": "keep"},
    "join": {"join": 1},
    "join by input": {"join": 1, "setting": ("join_divides",)},
    "load": {"legs": (2,)},
    "load on others": {"legs": (3,)},
    "switch off": _events((2, "switch", "none", {})),
    "switch": _events((2, "switch", "topk", {})),
    "resume": _events((3, "resume", "torch")),
    "save": _events((2, "save")),
    "raise before": _events((1, "raise", "first")),
    "raise within": _events((1, "raise", "middle"), ddp={"bucket_cap_mb": 0.0005}),
    "raise after": _events((1, "raise", "last")),
    "poison": _events((1, "poison", "middle", "nan")),
    "eval": _events((1, "eval")),
    "discard": _events((1, "discard")),
    "trip": _events((1, "trip")),
    "two forwards": _events((1, "two")),
    "penalty": _events((1, "penalty")),
    "freeze": _events((1, "freeze"), (3, "thaw"), model=("extra",), ddp=_UNUSED),
    "unregister": _events((2, "unregister")),
    "leave": _events((1, "leave", "middle")),
    "another group": _events((2, "group")),
}


# What a class says no to whatever else there is, by (class, feature), and how.
_LAYOUT = "cannot remove a hook or take a bucket layout"
_RAISED = "Expected to have finished reduction"
ALONE = {
    ("torch", "layout scheme"): _LAYOUT,
    ("torch", "layout shape"): _LAYOUT,
    ("torch", "unregister"): _LAYOUT,
    ("torch", "mixed precision"): "already has the hook|AcceleratorError",  # the latter: 2.11
    ("torch", "hold"): "has no hold",
    ("torch", "setting in_backward"): "without a hook, too",
    ("torch", "raise within"): _RAISED,
    ("torch", "raise after"): f"{_RAISED}|without a hook, too",
}
# Two features that are refused together, on both classes unless one is named, and how.
_CHANGING = ("unused by rank", "unused everywhere", "skips unused", "freeze")
_TWICE = "marked? .*ready (only once|twice)"
TOGETHER: dict[tuple[str, str], str] = {
    ("model reentrant", "unused by rank"): _TWICE,
    ("model reentrant", "unused everywhere"): _TWICE,
    ("model reentrant", "never used"): _TWICE,
    ("model reentrant", "find_unused"): _TWICE,
    ("model reentrant", "skips unused"): _TWICE,
    ("model reentrant", "freeze"): _TWICE,
    ("model reentrant", "two forwards"): _TWICE,
    **dict.fromkeys((("static_graph", value) for value in _CHANGING), "training graph has changed"),
    ("model reentrant", "penalty"): "incompatible with .grad|without a hook, too",
    ("setting compiled", "penalty"): "non-empty donated buffers|without a hook, too",
    ("setting delayed", "setting in_backward"): "run in backward",
    ("setting delayed", "join"): "does not take part in the delayed all-reduce",
    ("setting delayed", "join by input"): "does not take part in the delayed all-reduce",
}
# What the package says where a scheme, an option or a wrapper does not go with another.
OF_SCHEMES = (
    r"TwoPhase\(codec=...\) is a Codec",
    "keeps what was not sent already",
    "something else than an average of gradients",
    "does not give the average of gradients",
    "uncompressed first steps of its own",
)
# What PyTorch's class may say no to, whatever the pair.
OF_TORCH = (
    "without a hook, too",  # it fails by itself
    "join with find_unused_parameters=True",  # with a scheme that has memory
    "trained without a hook before",  # and skips buckets
)
# Pairs that mean nothing: they are not run.
APART = {
    **dict.fromkeys(
        (
            ("mixed precision", f"model {name}")
            for name in ("bf16", "f16", "f64", "all_bf16", "all_f64", "complex", "sparse")
        ),
        "the model has types of its own",
    ),
    ("mixed precision", "setting ignored"): "what is ignored is not cast, and meets what is",
    ("mixed precision", "setting delayed"): "what is delayed is not cast, and meets what is",
    **dict.fromkeys(
        ((f"model {value}", "model complex") for value in ("all_bf16", "all_f64")),
        "the cast makes complex parameters real",
    ),
    **dict.fromkeys(
        (("model recompute", buffer) for buffer in ("buffers", "own buffers")),
        "each forward pass moves the buffers, and the reference has only one",
    ),
    **dict.fromkeys(
        ((other, "unregister") for other in ("load", "load on others", "resume")),
        "there is no hook to load into, or that was saved",
    ),
    **dict.fromkeys(
        (("part of the ranks", other) for other in ("load", "load on others")),
        "the ranks that are in no group have saved nothing",
    ),
    **dict.fromkeys(
        (("setting in_backward", value) for value in ("raise within", "raise after")),
        "what has been averaged by then is stepped, and the reference steps nothing",
    ),
    ("part of the ranks", "another group"): "the ranks that are in no group do not come to it",
    ("freeze", "another group"): "our class averages what is trained when the ranks change",
    ("no_sync", "discard"): "the discarded pass makes the next no_sync pass a synchronised one",
    ("scheme noop", "wrap ef21"): "ranks that average nothing follow different estimates",
    ("scheme noop", "leave"): "nobody waits for anybody",
    ("scheme noop", "setting delayed"): "delayed gradients are averaged, the others are not",
    ("leave", "load"): "the processes have ended",
    ("leave", "load on others"): "the processes have ended",
}
# Uses their gradients before they are averaged: it does not wait for its all-reduce.
UNRELIABLE = {("torch", "setting delayed")}


def expected(host: str, left: str, right: str) -> str | None:
    """Returns how a pair is (of ``TOGETHER``), or may be refused; None: it is not."""
    for pair in ((left, right), (right, left)):
        if pair in TOGETHER:
            return TOGETHER[pair]
    may = OF_TORCH if host == "torch" else ()
    if all(name.split()[0] in ("scheme", "option", "wrap") for name in (left, right)):
        may += OF_SCHEMES
    return "|".join(may) or None


def case_of(host: str, *names: str) -> Case | None:
    """The case that has these features; None where two want different things."""
    values: dict[str, Any] = {}
    for name in names:
        for key, value in FEATURES[name].items():
            if key not in values:
                values[key] = value
            elif isinstance(value, tuple):
                values[key] = values[key] + tuple(
                    element for element in value if element not in values[key]
                )
            elif isinstance(value, dict):
                values[key] = {**values[key], **value}
            elif values[key] != value:
                return None
    if "join" in values and "events" in values:
        return None  # they run out of inputs at different times: nothing is between two steps
    events = sorted(values.get("events", ()), key=lambda event: event[0])
    known = {field.name for field in fields(Case)}
    assert set(values) <= known
    return Case(**{**PLAIN, "host": host, **values, "events": tuple(events)})


def pairs(host: str) -> Iterator[tuple[str, str]]:
    """All pairs, in an order that has nothing to do with their names."""
    left_out = {*ALONE, *UNRELIABLE}
    alone = [name for name in FEATURES if (host, name) not in left_out]
    results = [
        (left, right)
        for left, right in combinations(alone, 2)
        if (left, right) not in APART
        and (right, left) not in APART
        and case_of(host, left, right) is not None
    ]
    yield from sorted(results, key=lambda value: hashlib.blake2b(repr(value).encode()).digest())


def run_pairs(
    wanted: list[Pair], *, processes: int = 2, patience: float = 10.0
) -> dict[Pair, Verdict]:
    """Returns the verdicts on these pairs."""
    verdicts: dict[Pair, Verdict] = {}

    def run(runner: Runner, pair: Pair) -> None:
        case = case_of(*pair)
        assert case is not None
        verdicts[pair] = runner.run(case)
        if len(verdicts) % 100 == 0:
            print(f"{len(verdicts)} pairs", flush=True)

    each_on_a_runner(wanted, run, processes=processes, patience=patience)
    return verdicts


def wrong(verdicts: dict[Pair, Verdict]) -> list[str]:
    """Returns lines on pairs that are broken, refused without need, or not refused any more."""
    lines = []
    for (host, left, right), verdict in sorted(verdicts.items()):
        name, reason = f"{host}: {left} + {right}", expected(host, left, right)
        if verdict.status == "broken":
            case = case_of(host, left, right)
            assert case is not None
            lines.append(f"BROKEN {name}: {verdict.law}: {verdict.text[:200]}")
            lines.append(f"  python -m tests.fuzz --case '{case.dumps()}'")
        elif verdict.status == "refused":
            if reason is None or not re.search(reason, verdict.text):
                lines.append(f"NOT EXPECTED to be refused: {name}: {verdict.text[:200]}")
        elif (left, right) in TOGETHER:
            lines.append(f"NOT REFUSED any more: {name}")
    return lines


def show(verdicts: dict[Pair, Verdict]) -> str:
    """Returns a text: what is wrong, and the refused pairs by reason."""
    reasons: dict[str, list[str]] = {}
    count = dict.fromkeys(("ok", "refused", "broken"), 0)
    for (host, left, right), verdict in sorted(verdicts.items()):
        count[verdict.status] += 1
        if verdict.status == "refused":
            reason = f"{verdict.law}: {verdict.text[:200]}"
            reasons.setdefault(reason, []).append(f"{host}: {left} + {right}")
    lines = wrong(verdicts)
    for reason, names in sorted(reasons.items()):
        lines.append(f"refused, {reason}")
        lines += [f"  {name}" for name in names]
    return "\n".join([*lines, f"{len(verdicts)} pairs: {count}"])


def main() -> int:
    """The command line; 1 if a pair is not as it is to be."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.pairs", description=__doc__)
    parser.add_argument("--share", type=float, default=1.0, help="of all pairs")
    parser.add_argument("--skip", type=float, default=0.0, help="share to leave out before that")
    parser.add_argument("--host", choices=HOSTS, action="append")
    parser.add_argument("--with", dest="feature", choices=list(FEATURES))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--patience", type=float, default=10.0, help="seconds")
    asked = parser.parse_args()
    wanted = []
    for host in asked.host or HOSTS:
        of_host = [pair for pair in pairs(host) if asked.feature is None or asked.feature in pair]
        first, count = (round(len(of_host) * value) for value in (asked.skip, asked.share))
        wanted += [(host, *value) for value in of_host[first : first + count]]
    verdicts = run_pairs(wanted, processes=asked.processes, patience=asked.patience)
    print(show(verdicts))
    return int(bool(wrong(verdicts)))


if __name__ == "__main__":
    sys.exit(main())
