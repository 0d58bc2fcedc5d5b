"""Gated MLPs (Shazeer, "GLU variants improve transformer", 2020)."""

from __future__ import annotations

from torch import Tensor

from slotwise.kernels.interface import Activation
from slotwise.model.layers.linear import Linear
from slotwise.model.layers.share import mlp_share
from slotwise.model.layers.source import NO_CUTS, Source
from slotwise.model.stored import Cut


class GatedMLP:
    """`[tokens, hidden] -> [tokens, hidden]`: `down(activation(gate(x)) * up(x))`."""

    def __init__(
        self, source: Source, name: str, sizes: tuple[int, int], *, activation: Activation = "silu", bias: bool = False,
        is_fused: bool = False, is_partial: bool = False,
    ) -> None:
        """`sizes` are those of the hidden state and between the products; one weight, gates first, `is_fused`.

        Where ranks share it, its results are summed over them, unless the caller does (`is_partial`).
        """
        hidden, intermediate = sizes
        parts = {f"{name}.gate_proj": intermediate, f"{name}.up_proj": intermediate}
        if is_fused:
            parts = {f"{name}.gate_up_proj": 2 * intermediate}
        gate_cuts, down_cuts = NO_CUTS, NO_CUTS
        down = f"{name}.down_proj"
        if source.group.size > 1:
            own = mlp_share(intermediate, source.group, source.unit)
            ups = range(intermediate + own.start, intermediate + own.stop)
            gate_cuts = dict.fromkeys(parts, Cut((own, ups) if is_fused else (own,)))
            down_cuts = {down: Cut(columns=own)}
        self.gate_up = Linear(source, parts, hidden, bias=bias, gate=activation, cuts=gate_cuts)
        self.down = Linear(source, {down: hidden}, intermediate, bias=bias, cuts=down_cuts, is_partial=is_partial)
        self.bytes = self.token_bytes = self.gate_up.bytes + self.down.bytes

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.gate_up(x))
