"""Layers with a recurrent state: the gated delta rule behind a short convolution (Yang et al., "Gated Delta Networks:
Improving Mamba2 with Delta Rule", 2024).

    q, k, v ─► convolution over the last `taps` tokens, SiLU ─► q and k of length 1 ─► the rule ─► norm, times silu(z)

    state = decay * state;  state += outer(k, beta * (v - k @ state));  out = q @ state / sqrt(key_dim)

of each value head, with `beta = sigmoid(b)` and `decay = exp(rate * softplus(a + step_bias))`.

All that a row's past is to such a layer is one state: that of the rule, and the last inputs of the convolution.  It
lies in the cache where other layers have keys and values: the block that holds token t in a row's block table holds the
state behind the last token so far in that block.  So a full block is a snapshot at its edge, and a step reads the block
of the token before its first one, and writes those of its own tokens.

    tokens    0 .. 15 | 16 .. 31 | 32 .. 40       block_size 16
    state       [5]       [2]        [9]          behind tokens 15, 31 and 40; the next step reads block 9 alone
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from slotwise.kernels.interface import LayerCache, RaggedBatch

LENGTH_EPS = 1e-6  # added to the squares of queries and keys that are made as long as 1


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """The sizes of a layer with a recurrent state."""

    window: ClassVar[int] = 1  # tokens: a state is read with the token behind it
    num_key_heads: int  # each serves as many value heads, one behind the other
    num_value_heads: int
    key_dim: int
    value_dim: int
    taps: int  # tokens that the convolution sees

    @property
    def channels(self) -> int:
        """Of the convolution: queries, keys and values of all heads."""
        return 2 * self.num_key_heads * self.key_dim + self.values

    @property
    def values(self) -> int:
        """Numbers of all value heads."""
        return self.num_value_heads * self.value_dim

    @property
    def rule_floats(self) -> int:
        """Numbers of the rule's state, `[value heads, key_dim, value_dim]`."""
        return self.values * self.key_dim

    @property
    def state_bytes(self) -> int:
        """Bytes of a state, in float32: the rule's, then the inputs `[taps - 1, channels]`, the oldest first."""
        return torch.float32.itemsize * (self.rule_floats + (self.taps - 1) * self.channels)


class DeltaWeights(NamedTuple):
    """Weights beside those of products, in float32."""

    convolution: Tensor  # [taps, channels], the oldest token first
    rate: Tensor  # [value heads], below 0
    step_bias: Tensor  # [value heads]
    norm: Tensor  # [value_dim]
    eps: float


class DeltaKernels(Protocol):
    """What such layers need of kernels."""

    delta_refusal: str  # why `gated_delta` does not work, in one sentence; "" where it does

    def gated_delta(
        self, mixed: Tensor, gates: Tensor, weights: DeltaWeights, cache: LayerCache, batch: RaggedBatch,
        shape: DeltaShape,
    ) -> Tensor:
        """All between a layer's products, of every row: `[tokens, value heads * value_dim]`.

        `mixed [tokens, channels + value heads * value_dim]` are queries, keys and values, then z; `gates [tokens, 2 *
        value heads]` are b, then a.  A row whose first position is 0 begins with a state of zeros, any other with that
        in the block of the position before; whatever else the cache holds does not matter.  Every row writes the states
        of its blocks, but those `batch.on_trial`.  A row's result is the same bit for bit however its tokens are
        divided among steps.

        Raises:
            ValueError: these kernels have no such layers: `delta_refusal`.
        """
        ...

    def sigmoid_mul(self, gate: Tensor, x: Tensor) -> Tensor:
        """`sigmoid(gate) * x`, both `[tokens, size]`."""
        ...


def reference_gated_delta(
    mixed: Tensor, gates: Tensor, weights: DeltaWeights, states: Tensor, batch: RaggedBatch, block_size: int,
    shape: DeltaShape,
) -> Tensor:
    """The contract in plain torch, over `states [blocks, floats]` float32."""
    out = mixed.new_empty(len(mixed), shape.values)
    starts = batch.query_starts.tolist()
    on_trial = [0] * len(starts) if batch.on_trial is None else batch.on_trial.tolist()
    for row, context in enumerate(batch.context_lens.tolist()):
        first, end = starts[row], starts[row + 1]
        position, table = context - (end - first), batch.block_tables[row].tolist()
        state = states[table[(position - 1) // block_size]].clone() if position else torch.zeros_like(states[0])
        while first < end:
            stop = min(end, first + block_size - position % block_size)
            part = slice(first, stop)
            out[part] = _advance(state, mixed[part].float(), gates[part].float(), weights, shape).to(out.dtype)
            if not on_trial[row]:
                states[table[position // block_size]] = state
            first, position = stop, position + stop - first
    return out


def _advance(state: Tensor, mixed: Tensor, gates: Tensor, weights: DeltaWeights, shape: DeltaShape) -> Tensor:
    """Advances `state [floats]`, in place, over the tokens of `mixed`; returns their results."""
    tokens, heads = len(mixed), shape.num_value_heads
    rule, before = state.split([shape.rule_floats, len(state) - shape.rule_floats])
    x, z = mixed.split([shape.channels, shape.values], dim=1)
    seen = torch.cat((before.view(shape.taps - 1, shape.channels), x))
    mixed = F.silu(sum(seen[tap : tap + tokens] * weight for tap, weight in enumerate(weights.convolution)))
    before.copy_(seen[tokens:].flatten())
    keys = shape.num_key_heads * shape.key_dim
    query, key, value = mixed.split([keys, keys, shape.values], dim=1)
    query, key = (_of_length_1(part.view(tokens, -1, shape.key_dim)).repeat_interleave(
        heads // shape.num_key_heads, dim=1) for part in (query, key))
    b, a = gates.chunk(2, dim=1)
    decay = torch.exp(weights.rate * F.softplus(a + weights.step_bias))
    matrix, beta, out = rule.view(heads, shape.key_dim, shape.value_dim), b.sigmoid(), torch.empty_like(value)
    for token, known in enumerate(value.view(tokens, heads, -1)):
        matrix *= decay[token, :, None, None]
        error = known - torch.einsum("hk,hkv->hv", key[token], matrix)
        matrix += torch.einsum("hk,hv->hkv", key[token], beta[token, :, None] * error)
        out[token] = torch.einsum("hk,hkv->hv", query[token], matrix).flatten() * shape.key_dim**-0.5
    heads_out = out.view(tokens, heads, -1)
    normed = heads_out * torch.rsqrt(heads_out.square().mean(-1, keepdim=True) + weights.eps) * weights.norm
    return normed.flatten(1) * F.silu(z)


def _of_length_1(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + LENGTH_EPS)
