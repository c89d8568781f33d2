"""A scheme on a model: registration, steps, state, ledger."""

from commhooks.hook.comm_hook import as_hook, comm_hook
from commhooks.hook.dcp import load_dcp
from commhooks.hook.ledger import Ledger
from commhooks.hook.register import register, unregister
from commhooks.hook.state import HookState

__all__ = ["HookState", "Ledger", "as_hook", "comm_hook", "load_dcp", "register", "unregister"]
