"""Lists the schemes of the studies, by their names in tables."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import commhooks
import commhooks.research.baselines

__all__ = ["NO_HOOK", "ON_LINKS", "SCHEMES", "VARIANTS", "Entry", "gives_mean"]

NO_HOOK = "(no hook)"


@dataclass(frozen=True)
class Entry:
    """Describes the hook of a row of a table.

    Attributes:
        scheme: as for :func:`commhooks.register`; "" is DistributedDataParallel without a hook.
        options: options of the scheme.
        dense_steps: name and value of the option for the number of dense steps at the start.
        outer: arguments of a :class:`commhooks.DiLoCo` on the same model.
    """

    scheme: str
    options: dict[str, Any] = field(default_factory=dict)
    dense_steps: tuple[str, int] | None = None
    outer: dict[str, Any] | None = None

    def options_with(self, dense_steps: int | None) -> dict[str, Any]:
        """Returns the options, with another number of dense steps if the scheme has any."""
        if self.dense_steps is None:
            return self.options
        option, usual = self.dense_steps
        return {**self.options, option: usual if dense_steps is None else dense_steps}


# Every built-in scheme and those that papers compare with, those with the most bytes first.
SCHEMES: dict[str, Entry] = {
    NO_HOOK: Entry(""),
    "none": Entry("none"),
    "fp16": Entry("fp16"),
    "bf16": Entry("bf16"),
    "gossip": Entry("gossip"),
    "int8": Entry("int8"),
    "fp8": Entry("fp8"),
    "fp8, MX": Entry("fp8", {"format": "mx_e4m3"}),
    "intsgd": Entry("intsgd"),
    "global_qsgd": Entry("global_qsgd"),
    "qsgd": Entry("qsgd"),
    "int4": Entry("int4"),
    "sdp4bit": Entry("sdp4bit"),
    "terngrad": Entry("terngrad"),
    "eden, 2 bits": Entry("eden", {"bits": 2}),
    "onebit": Entry("onebit"),
    "onebit_adam": Entry("onebit_adam", dense_steps=("freeze_step", 40)),
    "signsgd": Entry("signsgd"),
    "random_k 10 %": Entry("random_k", {"ratio": 0.1}),
    "random_block 10 %": Entry("random_block", {"ratio": 0.1}),
    "topk 10 %": Entry("topk", {"ratio": 0.1}),
    "topk 1 %": Entry("topk", {"ratio": 0.01}),
    "aligned_topk 10 %": Entry("aligned_topk", {"ratio": 0.1, "row": 64}),
    "dgc 1 %": Entry("dgc", {"ratio": 0.01, "sampled": False}, ("warmup_steps", 40)),
    "demo": Entry("demo"),
    "powersgd, rank 4": Entry("powersgd", {"rank": 4}, ("start_step", 10)),
    "powersgd, rank 1": Entry("powersgd", {"rank": 1}, ("start_step", 10)),
    "acpsgd, rank 4": Entry("acpsgd", {"rank": 4}),
    "batched_powersgd": Entry("batched_powersgd", {"rank": 1}, ("start_step", 10)),
    "noop": Entry("noop"),
}
# Timed on limited links by default: schemes that users would choose there.
ON_LINKS = (
    "none", "fp16", "bf16", "int8", "int4", "sdp4bit", "eden, 2 bits", "onebit",
    "onebit_adam", "topk 1 %", "dgc 1 %", "powersgd, rank 4", "acpsgd, rank 4", "noop",
)  # fmt: skip
# Trained by the convergence study, besides those above.
VARIANTS: dict[str, Entry] = {
    "powersgd, rank 2": Entry("powersgd", {"rank": 2}, ("start_step", 10)),
    "powersgd, rank 4, fp16": Entry(
        "powersgd", {"rank": 4, "wire_dtype": "fp16"}, ("start_step", 10)
    ),
    "acpsgd, rank 2, bf16": Entry("acpsgd", {"rank": 2, "wire_dtype": "bf16"}, ("start_step", 10)),
    "acpsgd, rank 4, bf16": Entry("acpsgd", {"rank": 4, "wire_dtype": "bf16"}, ("start_step", 10)),
    "acpsgd, rank 8, bf16": Entry("acpsgd", {"rank": 8, "wire_dtype": "bf16"}, ("start_step", 10)),
    "eden, 1 bit": Entry("eden", {"bits": 1}),
    "bf16, stochastic": Entry("bf16", {"stochastic": True}),
    "DiLoCo, every 11, int4": Entry("noop", outer={"scheme": "int4", "every": 11}),
}


def gives_mean(hook: commhooks.HookState) -> bool:
    """Whether the optimizer gets the same average of gradients on every rank.

    Other schemes give it an update (momentum, signs), a local gradient, or an average over some
    ranks.
    """
    scheme = hook.scheme
    return scheme.traits.returns == "mean" and scheme.traits.agrees
