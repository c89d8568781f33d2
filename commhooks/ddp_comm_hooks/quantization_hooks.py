"""Mirrors torch's ``quantization_hooks``: 256 levels per bucket, or per block of a bucket."""

from commhooks.classic import quantization_perchannel_hook, quantization_pertensor_hook

__all__ = ["quantization_perchannel_hook", "quantization_pertensor_hook"]
