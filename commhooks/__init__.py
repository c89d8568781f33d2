"""Gradient communication hooks with compression for PyTorch data-parallel training.

The names of daily use are here. Schemes are in :mod:`commhooks.schemes`, wrappers in
:mod:`commhooks.wrappers`, research tools in :mod:`commhooks.research`, base classes for authors of
packed codecs in :mod:`commhooks.core`, exceptions in :mod:`commhooks.errors`, other hosts than
DistributedDataParallel in :mod:`commhooks.hosts`. Hooks with the names of PyTorch's hooks are in
:mod:`commhooks.classic`, and can be imported from here.
"""

from commhooks import ddp_comm_hooks, errors, hosts, optim, schemes, wrappers
from commhooks._version import __version__

# The names of torch.distributed.algorithms.ddp_comm_hooks: a script that imports them from there
# runs after a change of the import. They are not in __all__: ``import *`` gives what is new here.
# ``as`` the same name marks a re-export for type checkers, which __all__ does for the others.
from commhooks.classic import (
    PostLocalSGDState as PostLocalSGDState,
)
from commhooks.classic import (
    PowerSGDState as PowerSGDState,
)
from commhooks.classic import (
    allreduce_hook as allreduce_hook,
)
from commhooks.classic import (
    batched_powerSGD_hook as batched_powerSGD_hook,
)
from commhooks.classic import (
    bf16_compress_hook as bf16_compress_hook,
)
from commhooks.classic import (
    bf16_compress_wrapper as bf16_compress_wrapper,
)
from commhooks.classic import (
    fp16_compress_hook as fp16_compress_hook,
)
from commhooks.classic import (
    fp16_compress_wrapper as fp16_compress_wrapper,
)
from commhooks.classic import (
    noop_hook as noop_hook,
)
from commhooks.classic import (
    post_localSGD_hook as post_localSGD_hook,
)
from commhooks.classic import (
    powerSGD_hook as powerSGD_hook,
)
from commhooks.classic import (
    quantization_perchannel_hook as quantization_perchannel_hook,
)
from commhooks.classic import (
    quantization_pertensor_hook as quantization_pertensor_hook,
)
from commhooks.core import Biased, Bucket, Codec, Result, Scheme, Slot, Traits, Unbiased
from commhooks.core.registry import register_scheme, scheme_names
from commhooks.errors import Error
from commhooks.hook import HookState, comm_hook, load_dcp, register, unregister
from commhooks.hosts import (
    Collectives,
    all_gather,
    all_reduce,
    process_group,
    reduce_scatter,
)
from commhooks.local import DiLoCo
from commhooks.predict.headroom import headroom
from commhooks.research import Simulation
from commhooks.verify import Verification
from commhooks.wrappers import ErrorFeedback, PerParameter, Rule, Schedule
from commhooks.wrappers.make import make
from commhooks.zero import ZeroOptimizer
from ddp_core import AllGather, AllReduce, AllToAll, overlapped

__all__ = [
    "AllGather",
    "AllReduce",
    "AllToAll",
    "Biased",
    "Bucket",
    "Codec",
    "Collectives",
    "DiLoCo",
    "Error",
    "ErrorFeedback",
    "HookState",
    "PerParameter",
    "Result",
    "Rule",
    "Schedule",
    "Scheme",
    "Simulation",
    "Slot",
    "Traits",
    "Unbiased",
    "Verification",
    "ZeroOptimizer",
    "__version__",
    "all_gather",
    "all_reduce",
    "comm_hook",
    "ddp_comm_hooks",
    "errors",
    "headroom",
    "hosts",
    "load_dcp",
    "make",
    "optim",
    "overlapped",
    "process_group",
    "reduce_scatter",
    "register",
    "register_scheme",
    "scheme_names",
    "schemes",
    "unregister",
    "wrappers",
]
