"""Plain MLPs, gated MLPs (Shazeer, "GLU variants improve transformer", 2020), and mixtures of experts.

A mixture (Shazeer et al., 2017; Fedus et al., 2021) has a router that chooses a few of many MLPs for each token:

    x ─► router ─► logits ─┐
    x ─────────────► experts chosen, weighted, added ─► + shared(x), or + sigmoid(gate(x)) * shared(x)

Routing, and the products that read only the weights of chosen experts, are one operation of the kernels, which also
counts the tokens of each expert.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slotwise.compute.kernels.interface import (
    Activation,
    ExpertActivation,
    ExpertWeights,
    Kernels,
    PlainActivation,
    Routing,
)
from slotwise.compute.kernels.matrix import QuantizedMatrix, Weight, formats_of, reordered
from slotwise.compute.model.layers.linear import Linear
from slotwise.compute.model.layers.rank_weights import NO_CUTS, WeightSource, expert_share, mlp_share
from slotwise.compute.model.stored_tensors import Cut
from slotwise.errors import CheckpointError

FUSED = "gate_up_proj", "down_proj"
SPLIT = "gate_proj", "up_proj", "down_proj"
"""The parts of an MLP, and of experts in files that split what the family's checkpoints have together."""


class GatedMLP:
    """`[tokens, hidden] -> [tokens, hidden]`: `down(activation(gate(x)) * up(x))`."""

    def __init__(
        self, source: WeightSource, name: str, sizes: tuple[int, int], *, activation: Activation = "silu",
        bias: bool = False, is_fused: bool = False, is_partial: bool = False, names: Sequence[str] = (),
        gates_last: bool = False, down_bias: bool | None = None,
    ) -> None:
        """`sizes`: hidden, intermediate.  `is_fused`: gates and ups are one weight, gates first or `gates_last`.

        `down_bias` is whether the second product has a bias; None: as the first.

        `names` are those of gate, what it gates, and down, or of both together and down, where they are not Llama's.

        Where ranks share it, its results are summed over them, unless the caller does (`is_partial`).
        """
        hidden, intermediate = sizes
        *firsts, last = names or (FUSED if is_fused else SPLIT)
        parts = {f"{name}.{part}": 2 * intermediate // len(firsts) for part in firsts}
        gate_cuts, down_cuts = NO_CUTS, NO_CUTS
        down = f"{name}.{last}"
        if source.group.size > 1:
            own = mlp_share(intermediate, source.group, source.unit)
            ups = range(intermediate + own.start, intermediate + own.stop)
            gate_cuts = dict.fromkeys(parts, Cut((own, ups) if is_fused else (own,)))
            down_cuts = {down: Cut(columns=own)}
        if gates_last:
            if source.group.size > 1:
                raise CheckpointError("tensor_parallel_size: an MLP whose gates are stored last is not divided among "
                                      "ranks: serve this model with tensor_parallel_size 1")
            gate_cuts = dict.fromkeys(parts, Cut((range(intermediate, 2 * intermediate), range(intermediate))))
        self.gate_up = Linear(source, parts, hidden, bias=bias, gate=activation, cuts=gate_cuts)
        self.down = Linear(source, {down: hidden}, intermediate, bias=bias if down_bias is None else down_bias,
                           cuts=down_cuts, is_partial=is_partial)
        self.bytes = self.token_bytes = self.gate_up.bytes + self.down.bytes

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.gate_up(x))


class NoMLP:
    """Stands where a layer has none."""

    bytes = token_bytes = 0

    def __call__(self, x: Tensor) -> Tensor:
        return x


class PlainMLP:
    """`[tokens, hidden] -> [tokens, hidden]`: `down(activation(up(x)))`.

    Args:
        names: of the two products, below `name`; they may have dots.
        sizes: hidden, intermediate.
    """

    def __init__(
        self, source: WeightSource, name: str, names: tuple[str, str], sizes: tuple[int, int], *,
        activation: Activation, bias: bool = True, is_partial: bool = False,
    ) -> None:
        """`is_partial`: the caller adds up the results of ranks that share it."""
        hidden, intermediate = sizes
        up, down = (f"{name}.{each}" for each in names)
        up_cuts, down_cuts = NO_CUTS, NO_CUTS
        if source.group.size > 1:
            own = mlp_share(intermediate, source.group, source.unit)
            up_cuts, down_cuts = {up: Cut((own,))}, {down: Cut(columns=own)}
        self.up = Linear(source, {up: intermediate}, hidden, bias=bias, activation=activation, cuts=up_cuts)
        self.down = Linear(source, {down: hidden}, intermediate, bias=bias, cuts=down_cuts, is_partial=is_partial)
        self.bytes = self.token_bytes = self.up.bytes + self.down.bytes

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.up(x))


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """An MLP of all tokens, weighted by the sigmoid of its gate's one output; None: weighted by 1.

    Several shared experts are one MLP as wide as all of them.
    """

    mlp: GatedMLP | PlainMLP
    gate: Linear | None = None

    @property
    def bytes(self) -> int:
        """Bytes of the weights, as packed."""
        return self.mlp.bytes + (self.gate.bytes if self.gate else 0)


class MixtureOfExperts:
    """`[tokens, hidden] -> [tokens, hidden]`.

    Args:
        weights: of each expert, read one after another.
        sizes: of the inputs of experts, and between an expert's products.
        latent: the products before and behind the experts, where these do not compute on hidden states.

    Attributes:
        ends: `[experts]` int64, the tokens of each expert and of those before it, of all steps so far.
    """

    def __init__(
        self, router: Linear, weights: Iterable[ExpertWeights], sizes: tuple[int, int], routing: Routing,
        source: WeightSource, *, activation: ExpertActivation = "silu", shared: SharedExpert | None = None,
        latent: tuple[Linear, Linear] | None = None,
    ) -> None:
        if latent is not None and source.group.size > 1:
            raise CheckpointError(f"tensor_parallel_size {source.group.size}: experts on latents are not divided among "
                                  "ranks: serve this model with tensor_parallel_size 1")
        self._kernels: Kernels = source.kernels
        self._reduce = source.group.all_reduce
        routing = replace(routing, held=expert_share(routing.num_experts, source.group))
        if source.group.size > 1 and routing.held is None:
            own = mlp_share(sizes[1], source.group)
            is_gated = not isinstance(activation, PlainActivation)
            weights = (_part(each, own, source.group.rank, is_gated=is_gated) for each in weights)
            sizes = sizes[0], len(own)
        self._router, self._shared, self._latent = router, shared, latent
        (hidden, intermediate), packed_bytes, dtype = sizes, source.kernels.linear_bytes, source.dtype
        each = iter(weights)  # packed as they are read
        first = next(each)
        of_one = packed_bytes(first.gate_up) + packed_bytes(first.down)
        of_one += (2 * intermediate + hidden) * dtype.itemsize if first.down_bias is not None else 0
        self.ends = torch.zeros(routing.num_experts, dtype=torch.int64, device=source.kernels.device)
        self._experts = source.kernels.experts(itertools.chain([first], each), routing, activation, self.ends)
        always_read = router.bytes + (shared.bytes if shared else 0)
        always_read += 0 if routing.correction is None else routing.correction.nbytes
        always_read += sum(product.bytes for product in latent or ())
        held = len(routing.experts)
        self.bytes = always_read + held * of_one
        self.token_bytes = always_read + -(-routing.top_k * held // routing.num_experts) * of_one

    def __call__(self, x: Tensor) -> Tensor:
        if self._latent is None:
            result = self._experts(x, self._router(x))
        else:
            before, behind = self._latent
            result = behind(self._experts(before(x), self._router(x)))
        if self._shared is not None:
            gate = None if self._shared.gate is None else self._shared.gate(x)
            result = self._kernels.add(self._shared.mlp(x), result, gate)
        return self._reduce(result)


def _part(weights: ExpertWeights, own: range, rank: int, *, is_gated: bool) -> ExpertWeights:
    """The columns `own` between an expert's products; rank 0 alone has the bias of `down`, which is added once."""
    if not isinstance(weights.gate_up, Tensor) or not isinstance(weights.down, Tensor):
        raise CheckpointError("quantized experts are not divided: hold each whole on a rank, enable_expert_parallel")
    half, at = len(weights.gate_up) // 2, slice(own.start, own.stop)
    gate_up = [None if whole is None else torch.cat((whole[:half][at], whole[half:][at])) if is_gated else whole[at]
               for whole in (weights.gate_up, weights.gate_up_bias)]
    assert gate_up[0] is not None
    bias = weights.down_bias
    return ExpertWeights(gate_up[0], weights.down[:, at].contiguous(), gate_up[1],
                         bias if bias is None or rank == 0 else torch.zeros_like(bias))


def _held(count: int, source: WeightSource) -> range:
    """The experts that this rank reads."""
    held = expert_share(count, source.group)
    return range(count) if held is None else held


def separate_experts(
    source: WeightSource, name: str, parts: Sequence[str], sizes: tuple[int, int], count: int, *, bias: bool = False,
) -> Iterator[ExpertWeights]:
    """Experts whose weights are tensors of their own; `parts` are the names of gate, what it gates, and down.

    Without gates they are those of the two products.

    Raises:
        CheckpointError: they are stored in different formats.
    """
    hidden, intermediate = sizes
    *firsts, down = parts
    formats = set()
    for expert in _held(count, source):
        at = f"{name}.{expert}"
        gate_up = source.weight({f"{at}.{part}.weight": (intermediate, hidden) for part in firsts})
        weights = ExpertWeights(gate_up, source.weight({f"{at}.{down}.weight": (hidden, intermediate)}))
        if bias:
            weights = weights._replace(
                gate_up_bias=source.tensor({f"{at}.{part}.bias": (intermediate,) for part in firsts}),
                down_bias=source.tensor({f"{at}.{down}.bias": (hidden,)}))
        formats.add((formats_of(weights.gate_up), formats_of(weights.down)))
        if len(formats) > 1:
            raise CheckpointError(f"{at} is stored in another format than the experts before it, which is not "
                                  "supported: serve a checkpoint that has one for all experts of a layer")
        yield weights


def stacked_experts(
    source: WeightSource, names: tuple[str, str], sizes: tuple[int, int], count: int, *, are_transposed: bool = False,
) -> Iterator[ExpertWeights]:
    """Experts that lie together in two tensors: gates and what they gate, and down.

    `are_transposed`: each matrix is `[inputs, outputs]`.
    """
    (hidden, intermediate), held = sizes, _held(count, source)
    matrices = (2 * intermediate, hidden), (hidden, intermediate)
    shapes = {name: (count, *(reversed(matrix) if are_transposed else matrix))
              for name, matrix in zip(names, matrices, strict=True)}
    gate_up, down = (source.tensor({name: shape}, NO_CUTS if len(held) == count else {name: Cut((held,))})
                     for name, shape in shapes.items())
    for own in zip(gate_up, down, strict=True):
        yield ExpertWeights(*(each.T.contiguous() if are_transposed else each for each in own))


def interleaved_experts(source: WeightSource, name: str, sizes: tuple[int, int], count: int) -> Iterator[ExpertWeights]:
    """Experts of gpt-oss: transposed, with biases, gates and ups in turn."""
    hidden, intermediate = sizes
    gate_up = source.weight({f"{name}.gate_up_proj": (count, hidden, 2 * intermediate)})
    gate_up_bias = source.tensor({f"{name}.gate_up_proj_bias": (count, 2 * intermediate)})
    down = source.weight({f"{name}.down_proj": (count, intermediate, hidden)})
    down_bias = source.tensor({f"{name}.down_proj_bias": (count, hidden)})
    order, in_place = torch.arange(2 * intermediate).view(-1, 2).T.flatten(), torch.arange(hidden)  # gates first
    for expert in _held(count, source):
        yield ExpertWeights(_transposed(gate_up, expert, order), _transposed(down, expert, in_place),
                            gate_up_bias[expert][order], down_bias[expert])


def _transposed(weight: Weight, expert: int, order: Tensor) -> Weight:
    """The outputs `order` of an expert in a tensor `[experts, depth, outputs]`: `[len(order), depth]`."""
    if isinstance(weight, Tensor):
        return weight[expert].T[order]
    assert isinstance(weight, QuantizedMatrix)
    return reordered(weight, expert * len(order) + order)
