"""Kernels for CPUs: Numba on a thread pool, and products with weights that are packed once."""

from slotwise.kernels.cpu.kernels import CpuKernels

__all__ = ["CpuKernels"]
