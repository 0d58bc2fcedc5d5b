"""Products with weights.

A `Linear` is one product of a layer: one weight of the checkpoint, or several that read the same input and are stacked
along their outputs, so that one product computes all of them:

    qkv     [ q_proj | k_proj | v_proj ]        parts by name, each with its number of outputs

Layers hold `Linear` objects and never a kernel's product, because what else may belong to a product belongs here: its
bias, its quantized form (kernels that quantize do so when they pack it), and what addresses a part by its name.  An
adapter adds a low-rank term to the outputs of a part; a shard of a tensor-parallel model keeps a range of each part's
outputs, or of the inputs.  Neither changes a family's file.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from slotwise.compute.kernels.interface import Activation, PlainActivation, activated
from slotwise.compute.kernels.interface import Linear as PackedLinear
from slotwise.compute.kernels.matrix import QuantizedMatrix, Weight, reordered
from slotwise.compute.model.layers.rank_weights import NO_CUTS, WeightSource
from slotwise.compute.model.lora_weights import AdaptableProduct
from slotwise.compute.model.stored_tensors import WHOLE, Cut, Cuts


class Linear:
    """`[tokens, inputs] -> [tokens, outputs]`: `x @ weight.T + bias`.

    Args:
        parts: outputs of each weight, by its name in the checkpoint without ".weight" or ".bias".
        gate: the first half of the outputs are gates: `activation(gates) * others`, half as many outputs.
        activation: of all outputs.
        order: the checkpoint's output at each place, of some or all of them; None: as in the checkpoint.
        is_exact: never quantized: a product whose outputs choose.
        cuts: the part of each weight that this rank holds (`rank_weights.py`); `parts` and `inputs` are the whole's.
            With a range of inputs the results are summed over the ranks, unless the caller does (`is_partial`).
    """

    def __init__(
        self, source: WeightSource, parts: Mapping[str, int], inputs: int, *, bias: bool = False,
        gate: Activation | None = None, activation: Activation | None = None, order: Tensor | None = None,
        is_exact: bool = False, cuts: Cuts = NO_CUTS, is_partial: bool = False,
    ) -> None:
        kernels, group = source.kernels, source.group
        is_row_parallel = any(cut.columns is not None for cut in cuts.values())
        self._reduce = group.all_reduce if is_row_parallel and not is_partial else None
        kept = {name: cuts.get(name, WHOLE).size((outputs, inputs)) for name, outputs in parts.items()}
        self.parts = {name: outputs for name, (outputs, _) in kept.items()}
        self.inputs = next(iter(kept.values()))[1]
        self.outputs = sum(self.parts.values()) if order is None else len(order)
        shapes = {f"{name}.weight": (outputs, inputs) for name, outputs in parts.items()}
        weight: Weight = (source.tensor if is_exact else source.weight)(
            shapes, {f"{name}.weight": cut for name, cut in cuts.items()})
        biases = source.tensor(
            {f"{name}.bias": (outputs,) for name, outputs in parts.items()},
            {f"{name}.bias": Cut(cut.rows) for name, cut in cuts.items()}) if bias else None
        if is_row_parallel and group.rank:  # a bias is added once
            biases = None
        if order is not None:
            weight, biases = _reordered(weight, order, source), None if biases is None else biases[order]
        self._product: PackedLinear
        self._adapters = None if is_exact else source.adapters
        self._activate: PackedLinear | None = None  # behind the product, where adapters add to what it takes
        if self._adapters is not None:
            self._added = self._adapters.register(AdaptableProduct(
                parts, inputs, cuts, order, biases, adds_biases=not (is_row_parallel and group.rank)))
            chosen = gate if activation is None else PlainActivation(activation)
            self._activate = None if chosen is None else activated(kernels, chosen)
            gate = activation = None
        if is_exact and isinstance(weight, Tensor):
            self._product, self.bytes = kernels.exact_linear(weight, biases), weight.nbytes
        else:
            self._product = kernels.linear(weight, biases, activation) if gate is None else kernels.gated(
                weight, biases, gate)
            self.bytes = kernels.linear_bytes(weight)  # as packed
        self.bytes += 0 if biases is None else self.outputs * source.dtype.itemsize

    def __call__(self, x: Tensor) -> Tensor:
        out = self._product(x)
        if self._adapters is not None and self._adapters.rows.are_any:
            out = self._added.add(x, out)
        out = out if self._activate is None else self._activate(out)
        return out if self._reduce is None else self._reduce(out)


def _reordered(weight: Weight, order: Tensor, source: WeightSource) -> Weight:
    """The outputs `order` of a weight; of several formats together they become plain numbers."""
    if isinstance(weight, QuantizedMatrix):
        return reordered(weight, order)
    plain = weight if isinstance(weight, Tensor) else weight.dequantized().to(source.kernels.device, source.dtype)
    return plain[order]
