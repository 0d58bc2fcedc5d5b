"""The first and the last layer: from token ids to hidden states, and from hidden states to logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from slotwise.kernels.matrix import QuantisedMatrix, StackedMatrix, Weight
from slotwise.model.layers.source import Source

TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"  # in the checkpoints of all families


class Embedding:
    """`[tokens] -> [tokens, hidden]`, rows of `table [vocabulary, hidden]` times `scale`.

    The scale is rounded to the type of the hidden states.  It is applied once, to a copy of a table of that type: the
    same numbers as in each step; of a quantised table, to the rows that a step reads.
    """

    def __init__(self, source: Source, table: Tensor | QuantisedMatrix, scale: float = 1.0) -> None:
        kernels, factor = source.kernels, torch.tensor(scale, dtype=source.dtype)
        self._rows: Callable[[Tensor], Tensor]
        if isinstance(table, Tensor):
            scaled = table if scale == 1.0 else table * factor
            self._rows = lambda token_ids: kernels.embed(scaled, token_ids)
            self.bytes = table.numel() * source.dtype.itemsize
        else:
            self._rows = kernels.embedding(table, source.dtype, float(factor))
            self.bytes = kernels.linear_bytes(table)

    def __call__(self, token_ids: Tensor) -> Tensor:
        return self._rows(token_ids)


class Head:
    """`[tokens, hidden] -> [tokens, vocabulary]`, logits in the type of the weights.

    Args:
        weight: `[vocabulary, hidden]`; the embedding's table where the two are tied.
        soft_cap: logits become `soft_cap * tanh(logit / soft_cap)`; 0: they stay.
        scale: of logits, applied once to a copy of the weight: exactly, where it is a power of two.
    """

    def __init__(
        self, source: Source, weight: Weight, soft_cap: float = 0.0, scale: float = 1.0,
    ) -> None:
        self._kernels = source.kernels
        self._product = source.kernels.head(weight * scale if isinstance(weight, Tensor) and scale != 1.0 else weight)
        self.soft_cap = soft_cap
        self.bytes = source.kernels.head_bytes(weight)

    def __call__(self, x: Tensor) -> Tensor:
        logits = self._product(x)
        return self._kernels.soft_cap(logits, self.soft_cap) if self.soft_cap else logits


@dataclass(frozen=True, slots=True)
class EndOptions:
    """What a family's first and last layer do beside looking up and multiplying."""

    tied: bool  # the head is the embedding's table, unscaled
    scale: float = 1.0  # of the embedding
    soft_cap: float = 0.0
    logit_scale: float = 1.0


def read_ends(source: Source, vocab_size: int, hidden_size: int, options: EndOptions) -> tuple[Embedding, Head]:
    """Embedding and head under the names that all families use."""
    size = (vocab_size, hidden_size)
    read = source.weight if options.logit_scale == 1.0 else source.tensor  # what is scaled is copied
    table = read({TABLE: size})
    weight = table if options.tied else read({HEAD: size})
    assert not isinstance(table, StackedMatrix)  # of several names
    embedding = Embedding(source, table, options.scale)
    if options.tied and not isinstance(table, Tensor):
        embedding.bytes = 0  # kernels share what they packed for the head
    return embedding, Head(source, weight, options.soft_cap, options.logit_scale)
