"""Runs a scheme on a model: registration, steps, state and ledger."""

# Modules, in the order in which to read them:
#
# _registration   register and unregister
# _state          HookState, what users call
# _running        its base: the parts of a hook, and what happens in a step
# _hook_function  the function that DistributedDataParallel calls
# _target         the model and the process group
# _parameters     the names and shapes of the model's parameters
# _runner         which bucket belongs to which step, and when a step ends
# _exchanges      buckets of all hosts, handed to the driver of their device
# _coalesce       buckets that are held and exchanged together
# _engine         the scheme, its memory (core._memory), and the commit of a step
# _ledger         sums of bytes and times (of each collective: ddp_core.exchange)
# _handshake      ranks compare what they run before a collective call
# _attachment     what notices that the hook is not called, or not on this model
# _capture        torch.compile and CUDA graphs
# _saving         state_dict and load_state_dict
# _pickling       pickles of a hook
# _dcp            torch.distributed.checkpoint
# _group_change   change_group
# _sharded        parameters of which each rank keeps a shard

from commhooks.hook._dcp import load_dcp
from commhooks.hook._group_change import GroupChange
from commhooks.hook._hook_function import as_hook, comm_hook
from commhooks.hook._ledger import Ledger
from commhooks.hook._registration import register, unregister
from commhooks.hook._state import CandidateResult, HookState

__all__ = [
    "CandidateResult",
    "GroupChange",
    "HookState",
    "Ledger",
    "as_hook",
    "comm_hook",
    "load_dcp",
    "register",
    "unregister",
]
