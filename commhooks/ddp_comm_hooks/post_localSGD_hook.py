"""Mirrors torch's module ``post_localSGD_hook``: a state, and the hook that takes it."""

from commhooks.classic import PostLocalSGDState, post_localSGD_hook

__all__ = ["PostLocalSGDState", "post_localSGD_hook"]
