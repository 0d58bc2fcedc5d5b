"""Products with weights on a CPU: packing, micro-kernels for each type of weight, and the paths of processors."""
