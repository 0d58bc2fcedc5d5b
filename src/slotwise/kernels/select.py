"""Which kernels compute for which device."""

from __future__ import annotations

from slotwise.kernels.base import Kernels


def choose(device: str, quantization: str = "none") -> Kernels:
    """The kernels of `device`: `cpu`, or `reference` for plain torch, which quantises nothing.

    Raises:
        ValueError: any other name, or a quantization that the device does not offer.
    """
    if device == "cpu":
        from slotwise.kernels.cpu import CpuKernels

        return CpuKernels(quantization=quantization)
    if quantization != "none":
        raise ValueError(f"quantization {quantization} needs device cpu, not {device}")
    if device == "reference":
        from slotwise.kernels.reference import ReferenceKernels

        return ReferenceKernels()
    raise ValueError(f"no kernels for device {device!r}: choose 'cpu' or 'reference'")
