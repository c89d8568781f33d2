"""Declares, checks, compiles and launches ops."""

# op         an op: its schema, its definition, its kernels, and the choice between them
# arguments  what arguments may be, and their checks
# cpu        the library of CPU kernels
# cuda       launches of CUDA kernels
# nvrtc      their compilation
