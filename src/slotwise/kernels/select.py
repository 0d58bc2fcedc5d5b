"""Which kernels compute for which device."""

from __future__ import annotations

from slotwise.kernels.base import Kernels


def choose(device: str) -> Kernels:
    """The kernels of `device`: `cpu`, or `reference` for plain torch.  Raises ValueError for any other name."""
    if device == "cpu":
        from slotwise.kernels.cpu import CpuKernels

        return CpuKernels()
    if device == "reference":
        from slotwise.kernels.reference import ReferenceKernels

        return ReferenceKernels()
    raise ValueError(f"no kernels for device {device!r}: choose 'cpu' or 'reference'")
