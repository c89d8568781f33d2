"""Runs schemes inside FSDP2 and FSDP1: as the reduce-scatter, between nodes, in gathers."""

# Modules, in the order in which to read them:
#
# _fsdp2      the reduce-scatter of FSDP2, and the all-reduce of HSDP
# _gather     its gathers of parameters
# _replicate  data parallelism of FSDP2 by a scheme alone
# _fsdp1      FSDP1
# _fit        what hooks of both have in common

from commhooks.fsdp._gather import gather_parameters
from commhooks.fsdp._replicate import replicate

__all__ = ["gather_parameters", "replicate"]
