"""Linear attention by the gated delta rule (Yang et al., 2024), in place of attention: a state of fixed size per row.

    x ─► q, k, v, z ─┐
    x ─► b, a ───────┴─► convolution, rule, norm, gate ─► output
         Linear          one kernel, `gated_delta`        Linear

The state lies in the cache, in a group whose blocks hold one each (`DeltaShape` in `compute/kernels/interface.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from slotwise.compute.kernels.interface import DeltaShape, DeltaWeights, LayerCache, RaggedBatch
from slotwise.compute.model.layers.attention import LayerStep, StateAdvance, refuse_ranks
from slotwise.compute.model.layers.linear import Linear
from slotwise.compute.model.layers.rope import Rope
from slotwise.compute.model.layers.source import WeightSource


class GatedDelta:
    """The layer called `name` in the checkpoint.

    Args:
        is_interleaved: the weights of queries, keys, values and z are one, and those of b and a, too: of each key head
            with its value heads, one behind the other.
    """

    ropes: tuple[Rope, ...] = ()

    def __init__(
        self, source: WeightSource, name: str, shape: DeltaShape, hidden_size: int, eps: float, *, is_interleaved: bool,
    ) -> None:
        refuse_ranks(source, "a recurrent state")
        self.shape = shape
        self._kernels = source.kernels
        heads, keys = shape.num_value_heads, shape.num_key_heads
        per_key, values = heads // keys, heads // keys * shape.value_dim
        mixed = {f"{name}.in_proj_qkv": shape.channels, f"{name}.in_proj_z": shape.values}
        gates = {f"{name}.in_proj_b": heads, f"{name}.in_proj_a": heads}
        mixed_order = gates_order = None
        if is_interleaved:
            mixed, gates = {f"{name}.in_proj_qkvz": sum(mixed.values())}, {f"{name}.in_proj_ba": 2 * heads}
            mixed_order = _regrouped(keys, (shape.key_dim, shape.key_dim, values, values))
            gates_order = _regrouped(keys, (per_key, per_key))
        self._mixed = Linear(source, mixed, hidden_size, order=mixed_order)
        self._gates = Linear(source, gates, hidden_size, order=gates_order, is_exact=True)
        self.output = Linear(source, {f"{name}.out_proj": hidden_size}, shape.values)
        self._weights = _read_weights(source, name, shape, eps)
        self.bytes = self._mixed.bytes + self._gates.bytes + self.output.bytes
        self.bytes += sum(weight.nbytes for weight in self._weights if isinstance(weight, Tensor))

    def __call__(self, x: Tensor, step: LayerStep) -> Tensor:
        """`[tokens, hidden] -> [kept tokens, hidden]`."""
        return self.output(step.kept(self.store(x, step)))

    def store(self, x: Tensor, step: LayerStep) -> Tensor:
        """Advance the rows' states; returns what they yield, gated, `[tokens, value heads * value_dim]`."""
        mixed, gates = self._mixed(x), self._gates(x)

        def advance(mixed: Tensor, gates: Tensor, batch: RaggedBatch, cache: LayerCache) -> Tensor:
            return self._kernels.gated_delta(mixed, gates, self._weights, cache, batch, self.shape)

        def again(at: Tensor, batch: RaggedBatch, cache: LayerCache) -> None:
            advance(mixed.index_select(0, at), gates.index_select(0, at), batch, cache)

        if step.batch.on_trial is not None:
            step.advances.append(StateAdvance(step.layer, again))
        return advance(mixed, gates, step.batch, step.cache)


def _read_weights(source: WeightSource, name: str, shape: DeltaShape, eps: float) -> DeltaWeights:
    def read(part: str, *size: int) -> Tensor:
        return source.tensor({f"{name}.{part}": size}).float()

    taps = read("conv1d.weight", shape.channels, 1, shape.taps)
    rate = -torch.exp(read("A_log", shape.num_value_heads))
    return DeltaWeights(taps[:, 0].T.contiguous(), rate, read("dt_bias", shape.num_value_heads),
                        read("norm.weight", shape.value_dim), eps)


def _regrouped(groups: int, sizes: tuple[int, ...]) -> Tensor:
    """The order of outputs that lie group by group, each of parts of these `sizes`, part by part."""
    parts = torch.arange(groups * sum(sizes)).view(groups, -1).split(sizes, dim=1)
    return torch.cat([part.flatten() for part in parts])
