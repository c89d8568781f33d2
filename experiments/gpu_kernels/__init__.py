"""Tests and times the CUDA kernels on a GPU, in parts that can be interrupted and continued."""
