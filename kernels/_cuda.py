"""CUDA kernels: NVRTC, cubins, launches; the only module that imports CuPy."""


def missing() -> str | None:
    return "CUDA kernels are not there yet"
