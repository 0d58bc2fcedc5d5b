"""Chooses the device that computes, its kernels, and the sampling functions for them."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, cast

import torch

from slotwise.compute.kernels import reference
from slotwise.compute.kernels.interface import Kernels
from slotwise.platform.host import kernels_obstacle

if TYPE_CHECKING:
    from slotwise.compute.kernels.cpu.launcher import KernelLauncher
    from slotwise.compute.kernels.cpu.products.packing import Packing

logger = logging.getLogger(__name__)


def resolve(device: str) -> str:
    """The device that computes; `auto` means `cuda` where torch sees a GPU, else `cpu`.

    Where the CPU's kernels cannot run, `cpu` becomes `reference`, and a warning is logged.

    Raises:
        ValueError: `device` is `cuda`, and there is no GPU.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and (why := kernels_obstacle(torch.backends.cpu.get_cpu_capability())):
        logger.warning("%s: plain torch computes instead (device reference), which is slower", why)
        return "reference"
    if device == "cuda" and not torch.cuda.is_available():
        built = "sees no GPU" if torch.version.cuda else "was built for the CPU alone"
        raise ValueError(f"device cuda needs an NVIDIA GPU, and torch {torch.__version__} {built}: choose cpu or auto")
    return device


def choose(device: str, quantization: str = "none", kv_cache_dtype: str = "auto") -> Kernels:
    """The kernels of `device`: `cpu`, `cuda`, or `reference` for plain torch.

    Only the CPU's kernels quantize weights.  A cache that is smaller than the model's type is int8 on the CPU, fp8 on a
    GPU.

    Raises:
        ValueError: the name is unknown, the device is missing, or it does not support the quantization or cache type.
    """
    if device == "cpu":
        from slotwise.compute.kernels.cpu.kernels import CpuKernels

        return CpuKernels(quantization=quantization, kv_cache_dtype=kv_cache_dtype)
    if quantization != "none":
        raise ValueError(f"quantization {quantization} needs device cpu, not {device}")
    if device == "reference":
        from slotwise.compute.kernels.reference import ReferenceKernels

        return ReferenceKernels(kv_cache_dtype=kv_cache_dtype)
    if device == "cuda":
        resolve(device)
        return _cuda_kernels(kv_cache_dtype)
    raise ValueError(f"no kernels for device {device!r}: choose 'cpu', 'cuda' or 'reference'")


def draw_for(kernels: Kernels) -> reference.Draw:
    """The sampling function for kernels other than the CPU's, which have a sampler of their own."""
    if kernels.name == "cuda":
        from slotwise.compute.kernels.cuda.sampling import sample

        return sample
    return reference.draw


def mask_for(kernels: Kernels) -> reference.Mask:
    """The function that applies grammars' masks to logits of these kernels."""
    if kernels.name == "cuda":
        from slotwise.compute.kernels.cuda.sampling import mask_rows

        return mask_rows
    return reference.allowed_only


def launcher_of(kernels: Kernels) -> KernelLauncher:
    """The launcher of the CPU's kernels, wrapped or not, for other work on its threads."""
    return cast("KernelLauncher", cast(Any, kernels).launcher)


def packing_of(kernels: Kernels) -> Packing:
    """What packs weights for the CPU's kernels, wrapped or not."""
    return cast("Packing", cast(Any, kernels).packing)


def _cuda_kernels(kv_cache_dtype: str) -> Kernels:
    try:
        from slotwise.compute.kernels.cuda import CudaKernels
    except ImportError as error:
        raise ValueError(f"device cuda needs Triton, which cannot be imported ({error}): install triton") from error
    return CudaKernels(kv_cache_dtype=kv_cache_dtype)
