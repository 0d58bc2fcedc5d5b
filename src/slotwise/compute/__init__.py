"""What computes: the runner that executes plans, models, and the kernels below them."""
