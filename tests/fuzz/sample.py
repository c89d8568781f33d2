"""Draws a configuration from a seed."""

from __future__ import annotations

import random
from typing import Any

from tests.fuzz.case import Case
from tests.fuzz.hosted import Hosted
from tests.fuzz.hosts import HOSTS
from tests.fuzz.model import BRANCH_USES, MODEL_FEATURES
from tests.fuzz.schemes import OPTIONS, SCHEMES, WRAPPERS, build

__all__ = ["sample"]

_BUCKETS = (None, 0.0005, 0.001, 0.002)
_PLACES = ("first", "middle", "last")


def sample(seed: int) -> Case:
    """The case of a seed; what makes no sense together is not drawn."""
    draw = random.Random(f"case {seed}")
    values: dict[str, Any] = {"seed": seed}
    values["host"] = draw.choice(("torch", "torch", "core", "core", "core", *HOSTS))
    values["world"] = draw.choice((1, 2, 2, 2, 2, 2, 3, 3, 4))
    values["steps"] = draw.randint(3, 7)
    values["scaled"] = draw.random() < 0.4
    values["store"] = draw.choice(("file", "file", "tcp"))
    if values["host"] in HOSTS:
        return Case(**_hosted(draw, values, HOSTS[values["host"]]))
    values |= _scheme(draw)
    values["model"], values["use"] = _model(draw)
    values["ddp"] = _ddp(draw, values)
    values["setting"] = _setting(draw, values)
    values["micro"] = draw.choice((1, 1, 1, 2, 3))
    values["zero"] = draw.choice(("none", "none", "zeros", "keep"))
    if draw.random() < 0.07 and "part" not in values["setting"]:
        values["join"] = draw.randint(1, 2)
        if draw.random() < 0.5:
            values["setting"] += ("join_divides",)
    else:
        values["events"] = _events(draw, values)
        if draw.random() < 0.1 and "part" not in values["setting"]:
            others = [draw.choice((1, 2, 3, 4)) for _ in range(draw.randint(1, 2))]
            values["legs"] = tuple(others if draw.random() < 0.7 else [values["world"]])
    return Case(**_sensible(values))


def _hosted(draw: random.Random, values: dict[str, Any], kind: type[Hosted]) -> dict[str, Any]:
    """The case of another host than DistributedDataParallel."""
    setting = values["setting"] = draw.choice(kind.settings)
    values["world"] = draw.choice(kind.worlds)
    values["steps"] = draw.randint(2, 5)
    values["micro"] = draw.choice((1, 1, 2))

    def fitting() -> dict[str, Any]:
        for _ in range(60):
            chosen = _scheme(draw)
            if chosen and kind.takes(
                build(chosen["scheme"], chosen["options"], chosen["wrap"]), setting
            ):
                return chosen
        return {"scheme": "none", "options": {}, "wrap": ()}

    values |= fitting()
    model = _some(draw, kind.models, 0.15)
    if "complex" in model:
        model = [value for value in model if not value.startswith("all_")]
    values["model"] = tuple(model)
    events: list[tuple[Any, ...]] = []
    for _ in range(draw.choice((0, 1, 1, 2))):
        happens, at = draw.choice(kind.happens), draw.randrange(values["steps"])
        if happens == "poison":
            events.append((at, happens, draw.choice(_PLACES), draw.choice(("inf", "nan"))))
        elif happens == "switch":
            other = fitting()
            if not other["wrap"]:
                events.append((at, happens, other["scheme"], other["options"]))
        elif happens == "resume":
            events.append((at, happens, draw.choice(("torch", "gathered"))))
        else:
            events.append((at, happens))
    values["events"] = tuple(sorted(events, key=lambda event: event[0]))
    if kind.resizes and draw.random() < 0.25:
        # What a reduce-scatter needs of padding would be another shape of the same name.
        worlds = (values["world"],) if "reduce_scatter" in setting else kind.worlds
        values["legs"] = tuple(draw.choice(worlds) for _ in range(draw.randint(1, 2)))
    return values


def _some(draw: random.Random, choices: Any, share: float) -> list[Any]:
    return [choice for choice in choices if draw.random() < share]


def _scheme(draw: random.Random) -> dict[str, Any]:
    for _ in range(20):
        name = draw.choice(list(SCHEMES))
        options = {key: draw.choice(OPTIONS[key]) for key in _some(draw, OPTIONS, 0.15)}
        wrap = tuple(draw.sample(list(WRAPPERS), draw.choice((0, 0, 0, 1, 1, 2))))
        if name == "noop":  # nothing is averaged, so nothing around it has a meaning
            options, wrap = {}, ()
        try:
            build(name, options, wrap)
        except (TypeError, ValueError):  # it says no by itself: nothing for processes
            continue
        return {"scheme": name, "options": options, "wrap": wrap}
    return {}


def _model(draw: random.Random) -> tuple[tuple[str, ...], str]:
    chosen = _some(draw, [n for n in MODEL_FEATURES if n not in ("branches", "front")], 0.09)
    use = "all"
    if draw.random() < 0.4:
        chosen.append(draw.choice(("branches", "front")))
        use = draw.choice(list(BRANCH_USES))
    return tuple(chosen), use


def _ddp(draw: random.Random, values: dict[str, Any]) -> dict[str, Any]:
    chosen: dict[str, Any] = {}
    cap = draw.choice(_BUCKETS)
    if cap is not None:
        chosen["bucket_cap_mb"] = cap
    if draw.random() < 0.3 or values["use"] != "all" or "never" in values["model"]:
        chosen["find_unused_parameters"] = True
    if draw.random() < 0.15:
        chosen["static_graph"] = True
        if draw.random() < 0.8:
            chosen.pop("find_unused_parameters", None)
    for name, share in (("gradient_as_bucket_view", 0.25), ("skip_all_reduce_unused_params", 0.1)):
        if draw.random() < share:
            chosen[name] = True
    if draw.random() < 0.1:
        chosen["broadcast_buffers"] = False
    if values["host"] == "core" and draw.random() < 0.1:
        chosen["mixed_precision"] = draw.choice(("bf16", "bf16_f32"))
    return chosen


def _setting(draw: random.Random, values: dict[str, Any]) -> tuple[str, ...]:
    chosen = _some(draw, ("delayed", "group", "mesh", "ignored", "late"), 0.05)
    if values["world"] > 2:
        chosen += _some(draw, ("part",), 0.08)
    if values["host"] == "core":
        chosen += _some(draw, ("in_backward", "layout_scheme", "layout_shape"), 0.08)
        # By a draw of its own, so that seeds are the cases that they were in all else.
        own_draw = random.Random(f"when and by what {values['seed']}")
        chosen += _some(own_draw, ("hold",), 0.12)
    return tuple(chosen)


def _events(draw: random.Random, values: dict[str, Any]) -> tuple[tuple[Any, ...], ...]:
    steps = values["steps"]
    core = values["host"] == "core"
    events: list[tuple[Any, ...]] = []
    for _ in range(draw.choice((0, 0, 1, 1, 1, 2, 3))):
        kinds = ["switch", "resume", "raise", "poison"] * 4
        kinds += ["save", "eval", "discard", "trip", "two", "penalty", "freeze"] * 2
        kinds += ["group"] + ["unregister"] * 2 * core
        kind, at = draw.choice(kinds), draw.randrange(steps)
        if kind == "switch":
            events.append((at, kind, *_switch(draw)))
        elif kind == "resume":
            events.append((at, kind, draw.choice(("torch", "flat"))))
        elif kind == "raise":
            events.append((at, kind, draw.choice(_PLACES) if core else "first"))
        elif kind == "poison":
            events.append((at, kind, draw.choice(_PLACES), draw.choice(("inf", "nan"))))
        elif kind == "freeze":
            events.append((at, kind))
            if at + 1 < steps and draw.random() < 0.7:
                events.append((draw.randrange(at + 1, steps), "thaw"))
        else:
            events.append((at, kind))
    draw.random()  # so that seeds are the cases that they were
    if draw.random() < 0.05:  # an error within a step
        change = draw.choice((("assign",), ("cast", "double"), ("cast", "bfloat16")))
        return ((draw.randrange(1, steps), *change),)
    return tuple(sorted(events, key=lambda event: event[0]))


def _switch(draw: random.Random) -> tuple[str, dict[str, Any]]:
    name = draw.choice(list(SCHEMES))
    options = {"coalesce": True} if draw.random() < 0.15 else {}
    return name, options


def _sensible(values: dict[str, Any]) -> dict[str, Any]:
    """Without what contradicts itself, or what PyTorch documents as the user's mistake."""
    model, ddp, setting = set(values["model"]), values["ddp"], set(values["setting"])
    events = list(values.get("events", ()))
    kinds = {event[1] for event in events}
    if kinds & {"freeze"}:
        model.add("extra")
        ddp["find_unused_parameters"] = True
        ddp.pop("static_graph", None)
    if ddp.get("static_graph") and values["use"] not in ("all", "none"):
        values["use"] = "all"  # the same graph in every step is the user's promise
    if "static_graph" in ddp:
        drop = {"two", "penalty", "freeze", "thaw", "discard"}
        events = [event for event in events if event[1] not in drop]
    if {"reentrant", "twice", "recompute", "checkpoint"} & model or "sparse" in model:
        events = [event for event in events if event[1] != "penalty"]
    if "reentrant" in model and "find_unused_parameters" in ddp:
        model.discard("reentrant")  # PyTorch says no
    if "buffer" in model:
        # DistributedDataParallel synchronises no buffers in the first forward pass after an
        # evaluation, but it does in that of a new process.
        stops = {event[0] for event in events if event[1] == "resume"}
        events = [event for event in events if event[1] != "eval" or event[0] not in stops]
    if "recompute" in model:
        model -= {"buffer", "reentrant", "twice", "checkpoint"}
    if "mixed_precision" in ddp:
        model -= {"all_bf16", "all_f64", "bf16", "f16", "f64", "complex", "sparse"}
        setting -= {"delayed", "ignored"}  # not cast, so that their layers mix two dtypes
        if "reentrant" in model:  # within backward it restores full precision, see the guide
            events = [event for event in events if event[1] != "two"]
    if "complex" in model:
        model -= {"all_bf16", "all_f64"}
    if {"all_bf16", "all_f64"} <= model:
        model -= {"all_f64"}
    if values["micro"] > 1:  # a pass whose backward pass is still to come is waited for
        events = [event for event in events if event[1] != "discard"]
        # After one that raises, the next pass is averaged in its place. If that step raises, too,
        # its average is thrown away, and is in no sum.
        raises = [event for event in events if event[1] == "raise"]
        events = [event for event in events if event not in raises[1:]]
    if values["use"] in ("ranks", "random"):  # ranks have sent different buckets when it raises
        events = [event for event in events if event[1] != "raise"]
    if values.get("join") is not None:
        model -= {"recompute"}
        if "find_unused_parameters" in ddp and values["zero"] == "keep":
            # The kept gradient of a parameter that no rank uses stays as it is, and a rank that
            # has run out of inputs shows none of it.
            values["zero"] = "zeros"
    if "group" in setting or "part" in setting:
        setting -= {"mesh"}
    if {"group", "part"} <= setting:
        setting -= {"group"}
    if "part" in setting:
        events = [event for event in events if event[1] != "group"]
    if "in_backward" in setting:
        values["scaled"] = False  # the optimizer's one rate is not for gradients of any size
        drop = {"raise", "poison", "resume"}
        events = [event for event in events if event[1] not in drop]
        setting -= {"late", "ignored", "delayed"}
    if any(kind == "unregister" for _, kind, *_ in events):
        gone = next(at for at, kind, *_ in events if kind == "unregister")
        about_hooks = {"switch", "resume", "save", "unregister", "group"}
        events = [e for e in events if e[1] not in about_hooks or e[0] < gone]
        events = sorted([*events, (gone, "unregister")], key=lambda event: event[0])
        values.pop("legs", None)
    if "layout_shape" in setting:
        setting -= {"layout_scheme"}
    if values.get("scheme") == "noop":
        setting -= {"delayed"}
        values["zero"] = "none"
    if values["host"] == "torch":
        setting -= {"delayed"}  # on Gloo it uses their gradients before they are averaged
        if "static_graph" in ddp and "resume" in kinds:
            # After one in its first step, its gradients are local ones for good, with any hook.
            events = [event for event in events if event[1] != "raise"]
        if values["micro"] > 1:  # as with a forward pass without a backward pass
            events = [event for event in events if event[1] != "raise"]
        if values["use"] in ("ranks", "random") and "skip_all_reduce_unused_params" in ddp:
            values["use"] = "same"  # its documentation asks for it
        if "find_unused_parameters" in ddp:  # it looks at the last forward only
            events = [event for event in events if event[1] != "two"]
    order = [name for name in MODEL_FEATURES if name in model]
    values |= {"model": tuple(order), "ddp": ddp, "setting": tuple(sorted(setting))}
    if events or "events" in values:
        values["events"] = tuple(events)
    return values
