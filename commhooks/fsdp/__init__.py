"""Runs schemes in FSDP2 and FSDP1: in the reduce-scatter, between nodes, in all-gathers."""

# Modules, in the order in which to read them:
#
# _fsdp2      the reduce-scatter of FSDP2, and the all-reduce of HSDP
# _gather     the all-gather of FSDP2's parameters
# _replicate  data parallelism of FSDP2 by a scheme alone
# _fsdp1      FSDP1
# _configure  settings of a hook on FSDP2 or FSDP1

from commhooks.fsdp._gather import gather_parameters
from commhooks.fsdp._replicate import replicate

__all__ = ["gather_parameters", "replicate"]
