"""Kernels for processors: Numba on torch's threads, and products packed once."""

from slotwise.kernels.cpu.kernels import CpuKernels

__all__ = ["CpuKernels"]
