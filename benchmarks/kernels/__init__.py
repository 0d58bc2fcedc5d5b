"""Times the kernels of the CPU with cold caches."""
