"""The first and the last layer: from token ids to hidden states, and from hidden states to logits."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from slotwise.model.layers.source import Source

TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"  # in the checkpoints of all families


class Embedding:
    """`[tokens] -> [tokens, hidden]`, rows of `table [vocabulary, hidden]` times `scale`.

    The scale is applied once, to a copy of the table: the same numbers as in each step.
    """

    def __init__(self, source: Source, table: Tensor, scale: float = 1.0) -> None:
        self._kernels = source.kernels
        self._table = table if scale == 1.0 else table * scale
        self.bytes = table.numel() * source.dtype.itemsize

    def __call__(self, token_ids: Tensor) -> Tensor:
        return self._kernels.embed(self._table, token_ids)


class Head:
    """`[tokens, hidden] -> [tokens, vocabulary]`, logits in the type of the weights.

    Args:
        weight: `[vocabulary, hidden]`; the embedding's table where the two are tied.
        soft_cap: logits become `soft_cap * tanh(logit / soft_cap)`; 0: they stay.
        scale: of logits, applied once to a copy of the weight: exactly, where it is a power of two.
    """

    def __init__(self, source: Source, weight: Tensor, soft_cap: float = 0.0, scale: float = 1.0) -> None:
        self._kernels = source.kernels
        self._product = source.kernels.head(weight if scale == 1.0 else weight * scale)
        self.soft_cap = soft_cap
        outputs, depth = weight.shape
        self.bytes = source.kernels.head_bytes(outputs, depth, source.dtype)

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
    table = source.tensor({TABLE: size})
    weight = table if options.tied else source.tensor({HEAD: size})
    return Embedding(source, table, options.scale), Head(source, weight, options.soft_cap, options.logit_scale)
