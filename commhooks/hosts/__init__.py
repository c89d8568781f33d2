"""Adapts hooks to hosts other than DistributedDataParallel."""
