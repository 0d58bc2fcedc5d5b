"""Products with gates, from the operations that all kernels have."""

from __future__ import annotations

from torch import Tensor

from slotwise.kernels.interface import Activation, ClampedSwiGLU, Kernels, Linear
from slotwise.kernels.matrix import Weight


def in_two_steps(kernels: Kernels, weight: Weight, bias: Tensor | None, activation: Activation = "silu") -> Linear:
    """`gated` for kernels without a fused one: the product, then the activation."""
    product, multiply = kernels.linear(weight, bias), activated(kernels, activation)
    return lambda x: multiply(product(x))


def activated(kernels: Kernels, activation: Activation | ClampedSwiGLU) -> Linear:
    """`[tokens, 2 * intermediate] -> [tokens, intermediate]`: gates, and what they gate."""
    if isinstance(activation, ClampedSwiGLU):
        return lambda gate_up: kernels.clamped_swiglu(gate_up, activation)
    return {"silu": kernels.silu_mul, "gelu_tanh": kernels.gelu_mul}[activation]
