"""Mirrors torch's module ``powerSGD_hook``: a state, and the two hooks that take it."""

from commhooks.classic import PowerSGDState, batched_powerSGD_hook, powerSGD_hook

__all__ = ["PowerSGDState", "batched_powerSGD_hook", "powerSGD_hook"]
