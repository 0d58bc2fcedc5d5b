"""Gated MLPs (Shazeer, "GLU variants improve transformer", 2020)."""

from __future__ import annotations

from torch import Tensor

from slotwise.kernels.interface import Activation
from slotwise.model.layers.linear import Linear
from slotwise.model.layers.source import Source


class GatedMLP:
    """`[tokens, hidden] -> [tokens, hidden]`: `down(activation(gate(x)) * up(x))`."""

    def __init__(
        self, source: Source, name: str, sizes: tuple[int, int], *, activation: Activation = "silu", bias: bool = False,
        is_fused: bool = False,
    ) -> None:
        """`sizes` are those of the hidden state and between the products; one weight, gates first, `is_fused`."""
        hidden, intermediate = sizes
        parts = {f"{name}.gate_proj": intermediate, f"{name}.up_proj": intermediate}
        if is_fused:
            parts = {f"{name}.gate_up_proj": 2 * intermediate}
        self.gate_up = Linear(source, parts, hidden, bias=bias, gate=activation)
        self.down = Linear(source, {f"{name}.down_proj": hidden}, intermediate, bias=bias)
        self.bytes = self.token_bytes = self.gate_up.bytes + self.down.bytes

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.gate_up(x))
