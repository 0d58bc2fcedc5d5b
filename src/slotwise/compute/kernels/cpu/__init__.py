"""Kernels for CPUs: Numba on a thread pool, and products with weights that are packed once.

Importing this package imports nothing: compile workers start before the engine imports torch (`jit/workers.py`).
"""
