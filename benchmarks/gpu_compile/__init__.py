"""Compiles every Triton kernel for GPUs that need not be there, and bounds what came of it: `make gpu-compile`."""
