"""Measures what hooks, hosts, schemes, verification and ``ddp_core`` add to a step."""
