"""Small mixtures of experts, the same for every implementation."""

from __future__ import annotations

import torch
from torch import Tensor

from slotwise.compute.kernels.interface import ClampedSwiGLU, ExpertWeights

CLAMPED = ClampedSwiGLU(1.702, 1.0)


def numbers(kind: torch.dtype, *size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed + sum(size))).to(kind)


def weights(
    kind: torch.dtype, count: int, hidden: int, intermediate: int, *, with_bias: bool = False,
) -> list[ExpertWeights]:
    """So many experts, each from seeds of its own."""
    def biases(seed: int) -> tuple[Tensor, ...]:
        return numbers(kind, 2 * intermediate, seed=seed), numbers(kind, hidden, seed=seed)

    return [
        ExpertWeights(
            numbers(kind, 2 * intermediate, hidden, seed=seed) / 8, numbers(kind, hidden, intermediate, seed=seed) / 8,
            *(biases(seed) if with_bias else ()))
        for seed in range(count)]
