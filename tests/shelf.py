"""The names that ``import commhooks`` registers, and those of ``commhooks.research.baselines``.

Tests go through these and not through the registry, which has more names in a process where
another test has imported the baselines.
"""

from __future__ import annotations

from commhooks.core import _registry as registry

__all__ = ["BASELINES", "BUILT_IN"]

BUILT_IN = (
    *("acpsgd", "allreduce", "batched_powersgd", "bf16", "demo", "dgc", "eden", "fp16", "fp8"),
    *("gossip", "int4", "int8", "none", "noop", "onebit", "onebit_adam", "powersgd", "random_k"),
    *("sdp4bit", "signsgd", "topk"),
)
BASELINES = tuple(registry.BASELINES)
