"""Linear attention by the gated delta rule (Yang et al., 2024), in place of attention: a state of fixed size per row.

Also with a decay for each line of a state (Kimi Team, "Kimi Linear", 2025), where z and decays are two products each.

    x ─► q, k, v, z ─┐
    x ─► b, a ───────┴─► convolution, rule, norm, gate ─► output
         Linear          one kernel, `gated_delta`        Linear

The state lies in the cache, in a group whose blocks hold one each (`DeltaShape` in `compute/kernels/interface.py`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from slotwise.compute.kernels.interface import DeltaShape, DeltaWeights, LayerCache, RaggedBatch
from slotwise.compute.model.layers.attention import LayerStep, StateAdvance, refuse_ranks
from slotwise.compute.model.layers.linear import Linear
from slotwise.compute.model.layers.rank_weights import WeightSource
from slotwise.compute.model.layers.rope import Rope


class DeltaNames(NamedTuple):
    """What the parts of such a layer are called in the checkpoint."""

    # Of queries, keys and values: together, or each; and of z, where it is one product.
    mixed: tuple[str, ...] = ("in_proj_qkv", "in_proj_z")
    # Of b, and of a where it is one product.
    gates: tuple[str, ...] = ("in_proj_b", "in_proj_a")
    convolution: tuple[str, ...] = ("conv1d",)
    norm: str = "norm"
    output: str = "out_proj"
    # The two products of z and of a, the first of which has `value_dim` outputs; (): they are one product.
    z: tuple[str, str] | tuple[()] = ()
    decays: tuple[str, str] | tuple[()] = ()


QWEN = DeltaNames()
OWN_PRODUCTS = DeltaNames(
    ("q_proj", "k_proj", "v_proj", "g_proj"), ("b_proj", "a_proj"), ("q_conv1d", "k_conv1d", "v_conv1d"), "o_norm",
    "o_proj")
KIMI = OWN_PRODUCTS._replace(
    mixed=OWN_PRODUCTS.mixed[:3], gates=("b_proj",), z=("g_a_proj", "g_b_proj"), decays=("f_a_proj", "f_b_proj"))


class GatedDelta:
    """The layer called `name` in the checkpoint.

    Args:
        is_interleaved: the weights of queries, keys, values and z are one, and those of b and a, too: of each key head
            with its value heads, one behind the other.
        has_ordered_mixed: with `is_interleaved`, only b and a are interleaved; queries, keys and values are one weight,
            in this order, and z is another.
        has_tiled_values: the last product reads the first value head of each key head, then the second ones, and so
            on.
    """

    ropes: tuple[Rope, ...] = ()

    def __init__(
        self, source: WeightSource, name: str, shape: DeltaShape, hidden_size: int, eps: float, *,
        is_interleaved: bool = False, has_ordered_mixed: bool = False, has_tiled_values: bool = False,
        names: DeltaNames = QWEN,
    ) -> None:
        refuse_ranks(source, "a recurrent state")
        self.shape = shape
        self._kernels = source.kernels
        heads, keys = shape.num_value_heads, shape.num_key_heads
        per_key, values = heads // keys, heads // keys * shape.value_dim
        each = shape.num_key_heads * shape.key_dim
        sizes = (each, each, shape.values) if len(names.mixed) > 2 else (shape.channels,)
        mixed = dict(zip([f"{name}.{part}" for part in names.mixed], (*sizes, shape.values), strict=False))
        gates = dict(zip([f"{name}.{part}" for part in names.gates], (heads, shape.num_decays), strict=False))
        mixed_order = gates_order = None
        if is_interleaved:
            gates, gates_order = {f"{name}.in_proj_ba": 2 * heads}, _regrouped(keys, (per_key, per_key))
            if not has_ordered_mixed:
                mixed = {f"{name}.in_proj_qkvz": sum(mixed.values())}
                mixed_order = _regrouped(keys, (shape.key_dim, shape.key_dim, values, values))
        self._mixed = Linear(source, mixed, hidden_size, order=mixed_order)
        self._gates = Linear(source, gates, hidden_size, order=gates_order, is_exact=True)
        self._z, self._decays = (
            _read_pair(source, name, pair, (hidden_size, shape.value_dim, outputs), is_exact=is_exact)
            for pair, outputs, is_exact in ((names.z, shape.values, False), (names.decays, shape.num_decays, True)))
        self.output = Linear(source, {f"{name}.{names.output}": hidden_size}, shape.values)
        tiles = torch.arange(shape.values).view(keys, per_key, -1).transpose(0, 1).flatten()
        self._tiles = tiles.to(source.kernels.device) if has_tiled_values and per_key > 1 else None
        self._weights = _read_weights(source, name, shape, eps, names)
        self.bytes = self._mixed.bytes + self._gates.bytes + self.output.bytes
        self.bytes += sum(product.bytes for product in self._z + self._decays)
        self.bytes += sum(weight.nbytes for weight in self._weights if isinstance(weight, Tensor))

    def __call__(self, x: Tensor, step: LayerStep) -> Tensor:
        """`[tokens, hidden] -> [kept tokens, hidden]`."""
        return self.output(step.kept(self.store(x, step)))

    def store(self, x: Tensor, step: LayerStep) -> Tensor:
        """Advance the rows' states; returns what they yield, gated, `[tokens, value heads * value_dim]`."""
        mixed, gates = (self._appended(product(x), x, more)
                        for product, more in ((self._mixed, self._z), (self._gates, self._decays)))

        def advance(mixed: Tensor, gates: Tensor, batch: RaggedBatch, cache: LayerCache) -> Tensor:
            return self._kernels.gated_delta(mixed, gates, self._weights, cache, batch, self.shape)

        def again(at: Tensor, batch: RaggedBatch, cache: LayerCache) -> None:
            advance(mixed.index_select(0, at), gates.index_select(0, at), batch, cache)

        if step.batch.on_trial is not None:
            step.advances.append(StateAdvance(step.layer, again))
        found = advance(mixed, gates, step.batch, step.cache)
        return found if self._tiles is None else found.index_select(1, self._tiles)

    def _appended(self, first: Tensor, x: Tensor, pair: tuple[Linear, ...]) -> Tensor:
        """`first`, and behind it the outputs of the second product over those of the first."""
        if not pair:
            return first
        inner, outer = pair
        return self._kernels.rowwise(_beside, first, outer(inner(x)))


def _beside(first: Tensor, second: Tensor) -> Tensor:
    return torch.cat((first, second), dim=1)


def _read_pair(
    source: WeightSource, name: str, pair: tuple[str, ...], sizes: tuple[int, int, int], *, is_exact: bool,
) -> tuple[Linear, ...]:
    """Two products in turn; `sizes` are the inputs, the numbers between them, and the outputs."""
    if not pair:
        return ()
    inner, outer = (f"{name}.{part}" for part in pair)
    inputs, between, outputs = sizes
    return (Linear(source, {inner: between}, inputs, is_exact=is_exact),
            Linear(source, {outer: outputs}, between, is_exact=is_exact))


def _read_weights(
    source: WeightSource, name: str, shape: DeltaShape, eps: float, names: DeltaNames,
) -> DeltaWeights:
    def read(part: str, *size: int) -> Tensor:
        return source.tensor({f"{name}.{part}": size}).float()

    each = shape.num_key_heads * shape.key_dim
    channels = (each, each, shape.values) if len(names.convolution) > 1 else (shape.channels,)
    taps = source.tensor({f"{name}.{part}.weight": (size, 1, shape.taps)
                          for part, size in zip(names.convolution, channels, strict=True)}).float()
    heads = shape.num_value_heads
    rate = -torch.exp(read("A_log", *((1, 1, heads, 1) if shape.decays_lines else (heads,))).flatten())
    return DeltaWeights(taps[:, 0].T.contiguous(), rate, read("dt_bias", shape.num_decays),
                        read(f"{names.norm}.weight", shape.value_dim), eps)


def _regrouped(groups: int, sizes: tuple[int, ...]) -> Tensor:
    """The order of outputs that lie group by group, each of parts of these `sizes`, part by part."""
    parts = torch.arange(groups * sum(sizes)).view(groups, -1).split(sizes, dim=1)
    return torch.cat([part.flatten() for part in parts])
