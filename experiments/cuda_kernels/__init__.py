"""Finds in the machine code of CUDA kernels what decides their speed."""
