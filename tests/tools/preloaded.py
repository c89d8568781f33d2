"""Imported by the server that ranks are forked from: all that is slow to import, once.

``torch.distributed.optim`` alone takes a fifth of a second, which each of two thousand ranks paid,
and pandas a quarter, which sixty paid.
"""

import gc

import pandas  # noqa: F401
import pytest  # noqa: F401
import torch._dynamo.backends.debugging
import torch.distributed._composable
import torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook
import torch.distributed.algorithms.model_averaging.averagers
import torch.distributed.checkpoint
import torch.distributed.optim
import torch.utils.checkpoint  # noqa: F401

from tests.tools import models, training  # noqa: F401

# What is loaded stays: a rank neither looks through it nor, by doing so, copies its pages.
gc.collect()
gc.freeze()
gc.set_threshold(20_000)
