"""Kernels for NVIDIA GPUs: Triton kernels, and cuBLAS products through torch.

Importing this package imports Triton.  With TRITON_INTERPRET=1 in the environment before Triton is first imported, the
same kernels run on CPU tensors, slowly: this is how they are tested without a GPU.
"""

from slotwise.compute.kernels.cuda.kernels import CudaKernels

__all__ = ["CudaKernels"]
