"""Provides PyTorch's hooks and states under their names, on top of ``HookState`` and the schemes.

``ddp_model.register_comm_hook(state, hook)`` takes them in place of torch's. A hook finds the model
of a bucket by the bucket's parameters and keeps a :class:`commhooks.HookState` for each model, so
states are keyed by parameter name, models do not mix, and any number of buckets works on Gloo.
"""

# Modules, in the order in which to read them:
#
# _stateless                     all-reduce, casts, no-op
# _cast_wrappers                 casts around other hooks
# _minmax                        quantization by tensor and by channel
# _powersgd, _powersgd_models    PowerSGD and its state
# _local_sgd                     post-local SGD
# _optimizer_overlap             optimizers that step in the hook
# _launch, _hooked_model, _hook_access  a HookState behind each of them

import torch

from commhooks.classic._cast_wrappers import bf16_compress_wrapper, fp16_compress_wrapper
from commhooks.classic._local_sgd import PostLocalSGDState, post_localSGD_hook
from commhooks.classic._powersgd import PowerSGDState, batched_powerSGD_hook, powerSGD_hook
from commhooks.classic._stateless import (
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
    noop_hook,
    quantization_perchannel_hook,
    quantization_pertensor_hook,
)

__all__ = [
    "PostLocalSGDState",
    "PowerSGDState",
    "allreduce_hook",
    "batched_powerSGD_hook",
    "bf16_compress_hook",
    "bf16_compress_wrapper",
    "fp16_compress_hook",
    "fp16_compress_wrapper",
    "noop_hook",
    "post_localSGD_hook",
    "powerSGD_hook",
    "quantization_perchannel_hook",
    "quantization_pertensor_hook",
]

# A checkpoint as torch's documentation makes it has the hook function, which pickle saves by module
# and name. "commhooks" does not move when files do, and torch.load needs it among its safe globals.
_HOOKS = (
    allreduce_hook,
    batched_powerSGD_hook,
    bf16_compress_hook,
    fp16_compress_hook,
    noop_hook,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_perchannel_hook,
    quantization_pertensor_hook,
)
for _hook in _HOOKS:
    _hook.__module__ = "commhooks"
torch.serialization.add_safe_globals(list(_HOOKS))
