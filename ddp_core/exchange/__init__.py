"""Collectives as requests, and what drives them; knows no DistributedDataParallel."""
