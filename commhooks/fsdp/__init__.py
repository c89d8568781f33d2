"""Runs schemes inside FSDP2 and FSDP1: as the reduce-scatter, between nodes, in gathers."""

from commhooks.fsdp.gather import gather_parameters
from commhooks.fsdp.replicate import replicate

__all__ = ["gather_parameters", "replicate"]
