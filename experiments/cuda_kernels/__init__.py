"""Tells from the machine code of CUDA kernels what decides their speed."""
