"""torch's ``post_localSGD_hook``, the module: the state, and the hook that takes it."""

from commhooks.classic import PostLocalSGDState, post_localSGD_hook

__all__ = ["PostLocalSGDState", "post_localSGD_hook"]
