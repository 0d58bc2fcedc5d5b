"""Small mixtures of experts, the same for every implementation."""

from __future__ import annotations

import torch
from torch import Tensor

from slotwise.compute.kernels.interface import ClampedSwiGLU, ExpertGroups, ExpertWeights, Routing

CLAMPED = ClampedSwiGLU(1.702, 1.0)


def numbers(kind: torch.dtype, *size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed + sum(size))).to(kind)


ROUTINGS = {
    "DeepSeek-V2": Routing(12, 3, False, scale=16.0, groups=ExpertGroups(4, 2, 1)),
    "DeepSeek-V3": Routing(12, 3, True, "sigmoid", 2.5, 1e-20, ExpertGroups(4, 2, 2),
                           correction=numbers(torch.float32, 12)),
    "MiniMax-M2": Routing(8, 3, True, "sigmoid", correction=numbers(torch.float32, 8)),
    "ERNIE 4.5": Routing(8, 2, True, least_sum=0.4, correction=numbers(torch.float32, 8) / 8),
    "Phi-3.5-MoE": Routing(6, 2, False, "sparse_mixer", jitter=0.2),
    "Llama 4": Routing(5, 2, False, "sigmoid", scales_inputs=True)}
"""Of families whose shares are not the softmax of logits."""


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
