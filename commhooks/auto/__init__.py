"""Runs candidates in turns in a run's first steps, and keeps the fastest."""

# Modules, in the order in which to read them:
#
# _hook    the hook
# _trials  the turns of candidates

from commhooks.auto._hook import AutoHook

__all__ = ["AutoHook"]
