"""What a family composes: the layers of a decoder-only transformer, in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from slotwise.model.layers.attention import Attention
from slotwise.model.layers.embedding import Embedding, Head
from slotwise.model.layers.norm import NoNorm, RMSNorm


class MLP(Protocol):
    """`[tokens, hidden] -> [tokens, hidden]`."""

    bytes: int  # of the weights, as packed
    token_bytes: int  # of those that one token reads

    def __call__(self, x: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Attention and MLP, each added to the residual stream: `x += post_norm(f(norm(x)))`; most have no `post_norm`."""

    attention_norm: RMSNorm | NoNorm
    attention: Attention
    mlp_norm: RMSNorm | NoNorm
    mlp: MLP
    attention_post_norm: RMSNorm | None = None
    mlp_post_norm: RMSNorm | None = None

    @property
    def bytes(self) -> int:
        """Bytes of the weights, as packed."""
        norms = (self.attention_norm, self.mlp_norm, self.attention_post_norm, self.mlp_post_norm)
        return self.attention.bytes + self.mlp.bytes + sum(norm.bytes for norm in norms if norm is not None)


@dataclass(frozen=True, slots=True)
class Network:
    """A whole model.  `norm` is that of the last layer's output."""

    embedding: Embedding
    layers: Sequence[DecoderLayer]
    norm: RMSNorm
    head: Head

    @property
    def bytes(self) -> int:
        """Bytes of the weights, as packed; a tied head counts beside the embedding."""
        return self.embedding.bytes + sum(layer.bytes for layer in self.layers) + self.norm.bytes + self.head.bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of the weights that a step of one token reads: all but the embedding's and those of other experts."""
        unread = sum(layer.mlp.bytes - layer.mlp.token_bytes for layer in self.layers)
        return self.bytes - self.embedding.bytes - unread

    @property
    def has_post_norms(self) -> bool:
        """Whether a layer's results are normed before they are added."""
        return any(layer.attention_post_norm or layer.mlp_post_norm for layer in self.layers)
