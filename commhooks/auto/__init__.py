"""Runs candidates in turns in a run's first steps, and keeps the fastest."""

from commhooks.auto.hook import AutoHook

__all__ = ["AutoHook"]
