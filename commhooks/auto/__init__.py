"""Runs candidate schemes in turns in the first steps of a run, and keeps the fastest."""

# Modules, in the order in which to read them:
#
# _hook    the hook
# _trials  the turns of candidates

from commhooks.auto._hook import AutoHook

__all__ = ["AutoHook"]
