"""A configuration to try: plain data, of which everything but the plainest choice is a feature."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

__all__ = ["Case"]


@dataclass(frozen=True)
class Case:
    """One configuration; every default is the plainest choice, to which shrinking goes back.

    Attributes:
        seed: of weights, batches and random choices.
        host: "torch", whose DistributedDataParallel is used; "core", ours; or a name of
            ``tests.fuzz.hosts``.
        world: ranks.
        scheme: a registered name.
        options: of ``commhooks.make``.
        wrap: names of wrappers around it, innermost first; see ``tests.fuzz.schemes``.
        model: what the model has beyond three layers; see ``tests.fuzz.model``.
        scaled: gradients are from 1e-6 to 1e3 times as large, by parameter.
        store: of the processes' group: "file", or "tcp".
        use: which branches of the model are used when; see ``tests.fuzz.model``.
        ddp: arguments of DistributedDataParallel.
        setting: other ways to set up: "delayed", "layout", "group", "in_backward", "hold", ...
        steps: synchronised steps.
        micro: backward passes of a step, all but the last under ``no_sync``.
        zero: what becomes of gradients before a step: "none", "zeros" or "keep".
        join: steps that each rank has less than the rank before it; None: no ``join``.
        events: (step, kind, arguments ...), see ``tests.fuzz.events``.
        legs: world sizes on which it goes on from a checkpoint, for ``steps`` each.
    """

    seed: int = 0
    host: str = "torch"
    world: int = 2
    scheme: str = "none"
    options: dict[str, Any] = field(default_factory=dict)
    wrap: tuple[str, ...] = ()
    model: tuple[str, ...] = ()
    scaled: bool = False
    store: str = "file"
    use: str = "all"
    ddp: dict[str, Any] = field(default_factory=dict)
    setting: tuple[str, ...] = ()
    steps: int = 4
    micro: int = 1
    zero: str = "none"
    join: int | None = None
    events: tuple[tuple[Any, ...], ...] = ()
    legs: tuple[int, ...] = ()

    # ---- as text

    @classmethod
    def loads(cls, text: str) -> Case:
        """From what ``dumps`` gave; what is left out is as plain as can be."""
        values = json.loads(text)
        for name in ("wrap", "model", "setting", "legs"):
            values[name] = tuple(values.get(name, ()))
        values["events"] = tuple(tuple(event) for event in values.get("events", ()))
        unknown = set(values) - {value.name for value in fields(cls)}
        if unknown:
            raise ValueError(f"Case.loads: no such fields: {sorted(unknown)}")
        return cls(**values)

    def dumps(self) -> str:
        """One line of JSON, without what is plain."""
        plain = asdict(Case())
        return json.dumps({k: v for k, v in asdict(self).items() if k == "seed" or v != plain[k]})

    # ---- its features

    @property
    def averages(self) -> bool:
        """Returns whether all ranks get equal gradients."""
        switched = {event[2] for event in self.events if event[1] == "switch"}
        return "noop" not in switched | {self.scheme}

    @property
    def change(self) -> int | None:
        """The step before which parameters are replaced or cast."""
        return next((event[0] for event in self.events if event[1] in ("assign", "cast")), None)

    @property
    def features(self) -> frozenset[str]:
        """All that is not plain, but for numbers that only say how much."""
        names = ("host", "scheme", "use", "zero", "scaled", "store")
        named = {f"{n}={getattr(self, n)}" for n in names}
        named -= {f"{n}={getattr(Case(), n)}" for n in names}
        named |= {f"option {name}" for name in self.options}
        named |= {f"wrap {name}" for name in self.wrap}
        named |= {f"model {name}" for name in self.model}
        named |= {f"ddp {name}" for name in self.ddp}
        named |= {f"setting {name}" for name in self.setting}
        named |= {f"event {' '.join(map(str, self._kind(event)))}" for event in self.events}
        if self.world != 2:
            named.add("world > 2")
        if self.micro != 1:
            named.add("no_sync")
        if self.join is not None:
            named.add("join")
        if self.legs:
            others = any(leg != self.world for leg in self.legs)
            named.add("load on others" if others else "load")
        return frozenset(named)

    @staticmethod
    def _kind(event: tuple[Any, ...]) -> tuple[Any, ...]:
        return event[1:3] if event[1] in ("raise", "switch", "cast") else event[1:2]

    def without_hook(self) -> Case:
        """The same without a hook: what DistributedDataParallel does by itself."""
        about_hooks = ("switch", "resume", "save", "unregister")
        events = tuple(event for event in self.events if event[1] not in about_hooks)
        plain = Case()
        of_hooks = ("layout_", "through_")
        setting = tuple(value for value in self.setting if not value.startswith(of_hooks))
        return replace(
            self,
            scheme=plain.scheme,
            options={},
            wrap=(),
            legs=(),
            events=events,
            setting=(*setting, "plain"),
        )

    def simpler(self) -> Iterator[Case]:
        """The same with one feature less, the most telling first."""
        for index in range(len(self.events)):
            yield replace(self, events=self.events[:index] + self.events[index + 1 :])
        for name in ("wrap", "setting", "model", "legs"):
            values = getattr(self, name)
            for index in range(len(values)):
                yield replace(self, **{name: values[:index] + values[index + 1 :]})
        for name in ("ddp", "options"):
            values = getattr(self, name)
            for key in values:
                yield replace(self, **{name: {k: v for k, v in values.items() if k != key}})
        plain = Case()
        for name in ("scaled", "store", "join", "use", "micro", "zero"):
            if getattr(self, name) != getattr(plain, name):
                yield replace(self, **{name: getattr(plain, name)})
        if self.scheme != "none":
            yield replace(self, scheme="none", options={}, wrap=())
        elif "plain" not in self.setting and not self.wrap and not self.options:
            yield self.without_hook()
        if self.world > 2:
            yield replace(self, world=2)
        last = max((event[0] for event in self.events), default=0)
        for steps in (last + 1, last + 2, self.steps - 1):
            if last < steps < self.steps:
                yield replace(self, steps=steps)
        for index, event in enumerate(self.events):
            if event[0] > 0:
                earlier = (event[0] - 1, *event[1:])
                events = (*self.events[:index], earlier, *self.events[index + 1 :])
                yield replace(self, events=events)
        for host in ("torch", "core"):
            if host not in (self.host, "core" if self.host == "torch" else ""):
                yield replace(self, host=host)
        if self.seed:
            yield replace(self, seed=0)
