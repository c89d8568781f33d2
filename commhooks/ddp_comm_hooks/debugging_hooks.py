"""Mirrors torch's ``debugging_hooks``: a hook that exchanges nothing."""

from commhooks.classic import noop_hook

__all__ = ["noop_hook"]
