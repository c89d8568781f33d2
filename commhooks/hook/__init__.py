"""Runs a scheme on a model: registration, steps, state and ledger."""

from commhooks.hook.dcp import load_dcp
from commhooks.hook.group_change import GroupChange
from commhooks.hook.hook_function import as_hook, comm_hook
from commhooks.hook.ledger import Ledger
from commhooks.hook.registration import register, unregister
from commhooks.hook.state import HookState, Tried

__all__ = [
    "GroupChange",
    "HookState",
    "Ledger",
    "Tried",
    "as_hook",
    "comm_hook",
    "load_dcp",
    "register",
    "unregister",
]
