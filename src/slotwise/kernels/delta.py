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
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

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
