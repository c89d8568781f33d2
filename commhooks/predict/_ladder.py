"""Says which scheme to try first on which network: one table, for pages and commands."""

from __future__ import annotations

from dataclasses import dataclass

from commhooks.predict._device import device
from commhooks.predict._fabric import fabric
from commhooks.predict._models import model
from commhooks.predict._quality import gap_of
from commhooks.predict._step import predict_step
from commhooks.wrappers._make import make

__all__ = ["LADDER", "MODELS", "Rung", "ladder_lines", "ladder_markdown", "predicted_speed"]

MODELS = ("resnet50", "gpt2")
_RANKS = 4


@dataclass(frozen=True)
class Rung:
    """Holds what to try first on a network.

    Attributes:
        network: the link between ranks, in words.
        preset: its name for :func:`commhooks.predict.fabric`; empty: there is none.
        first: the scheme to begin with.
        then: the scheme to try next, whose loss has to be compared; empty: none. Its loss beside
            bf16's is that of :func:`commhooks.predict._quality.gap_of`.
        speed: of ``first`` and of ``then`` over bf16, for each of ``MODELS``, on four machines of
            an A100 each, as :func:`predicted_speed` returns it.
    """

    network: str
    preset: str
    first: str
    then: str = ""
    speed: tuple[tuple[float, ...], ...] = ()


LADDER = (
    Rung("NVLink, or 100 Gbit/s and more", "100gbe", "bf16"),
    Rung("25 Gbit/s", "25gbe", "int8", "sdp4bit", ((1.43, 1.65), (1.43, 2.3))),
    Rung("10 Gbit/s", "10gbe", "int8", "sdp4bit", ((1.75, 1.81), (2.78, 2.96))),
    Rung("1 Gbit/s", "1gbe", "int8", "powersgd", ((1.94, 1.95), (20.4, 35.9))),
    Rung("slower, or between sites", "", "DiLoCo"),
)
# What to write for a scheme whose name is not all of it.
_CALLS = {
    "powersgd": '"powersgd", start_step=1000',
    "DiLoCo": 'commhooks.DiLoCo(model, "int4", every=100)',
}


def predicted_speed(scheme: str, network: str, name: str) -> float:
    """Returns the step of bf16 over that of a scheme, on four machines of an A100 each.

    Args:
        scheme: its name.
        network: a preset of :func:`commhooks.predict.fabric`.
        name: of :data:`commhooks.predict.MODELS`.
    """
    a100 = device("a100")
    workload = model(name).workload(a100)
    steps = [
        predict_step(make(each), workload, ranks=_RANKS, fabric=fabric(network), device=a100)
        for each in ("bf16", scheme)
    ]
    return steps[0].step_s / steps[1].step_s


def ladder_markdown() -> str:
    """Returns the ladder as a table of Markdown."""
    head = ("network", "begin with", "speed", "loss", "if that is too slow", "speed", "loss")
    rows = [head, ("---",) * len(head)]
    for rung in LADDER:
        speed = [
            ", ".join(f"{v:.{2 if v > 10 else 3}g}×" for v in values) for values in rung.speed
        ] or ["", ""]
        first, then = (
            (f"`{_call(scheme)}`", each, _loss(scheme)) if scheme else ("", "", "")
            for scheme, each in zip((rung.first, rung.then), speed, strict=True)
        )
        rows.append((rung.network, *first, *then))
    return "\n".join(f"| {' | '.join(row)} |".replace("  ", " ") for row in rows)


def ladder_lines() -> list[str]:
    """Returns the ladder as lines for a terminal, with what to write in a call."""
    return [
        f"{rung.network}: {_call(rung.first)}"
        + (f"; if that is too slow, {_call(rung.then)}{_cost(rung)}" if rung.then else "")
        for rung in LADDER
    ]


def _loss(scheme: str) -> str:
    if scheme == "bf16":  # with which losses are compared
        return ""
    gap = None if scheme == "DiLoCo" else gap_of(make(scheme))
    return "not measured" if gap is None else str(gap)


def _cost(rung: Rung) -> str:
    gap = gap_of(make(rung.then))
    if gap is None:
        return ""
    measured = f", with {gap.dense}" if gap.dense else ""
    return f" (loss over bf16's{measured}: {gap})"


def _call(scheme: str) -> str:
    return _CALLS.get(scheme, f'"{scheme}"')
