"""The first and the last layer: from token ids to hidden states, and from these to logits, labels or vectors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from slotwise.compute.kernels.matrix import QuantizedMatrix, StackedMatrix, Weight
from slotwise.compute.model.layers.linear import Linear
from slotwise.compute.model.layers.source import NO_CUTS, WeightSource, share, shares
from slotwise.compute.model.sentence_modules import DenseFields
from slotwise.compute.model.stored_tensors import Cut
from slotwise.errors import CheckpointError

TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"  # in the checkpoints of all families


class Embedding:
    """`[tokens] -> [tokens, hidden]`, rows of `table [vocabulary, hidden]` times `scale`.

    The scale is rounded to the type of the hidden states.  It is applied once, to a copy of a table of that type: the
    same numbers as in each step; of a quantized table, to the rows that a step reads.  Where ranks share the
    vocabulary, a rank's table begins with `first_id`, and the sum over the ranks has the row of the one that holds it.
    """

    def __init__(
        self, source: WeightSource, table: Tensor | QuantizedMatrix, scale: float = 1.0, first_id: int = 0,
    ) -> None:
        kernels, factor = source.kernels, torch.tensor(scale, dtype=source.dtype)
        self._reduce = source.group.all_reduce
        first = None if source.group.size == 1 else first_id
        self._rows: Callable[[Tensor], Tensor]
        if isinstance(table, Tensor):
            scaled = table if scale == 1.0 else table * factor
            self._rows = lambda token_ids: kernels.embed(scaled, token_ids, first)
            self.bytes = table.numel() * source.dtype.itemsize
        else:
            self._rows = kernels.embedding(table, source.dtype, float(factor))
            self.bytes = kernels.linear_bytes(table)

    def __call__(self, token_ids: Tensor) -> Tensor:
        return self._reduce(self._rows(token_ids))


def read_embedding(source: WeightSource, name: str, size: tuple[int, int], scale: float = 1.0) -> Embedding:
    """The embedding called `name`, in addition to the model's own."""
    own, cuts = range(size[0]), NO_CUTS
    if source.group.size > 1:
        own = share(size[0], source.group, "tokens")
        cuts = {f"{name}.weight": Cut((own,))}
    table = source.weight({f"{name}.weight": size}, cuts)
    assert not isinstance(table, StackedMatrix)  # of several names
    if source.group.size > 1 and not isinstance(table, Tensor):
        raise CheckpointError(f"{name}: a quantized embedding is not supported with tensor_parallel_size: serve this "
                              "model with tensor_parallel_size 1")
    return Embedding(source, table, scale, own.start)


class LMHead:
    """`[tokens, hidden] -> [tokens, vocabulary]`, logits in the type of the weights.

    Args:
        weight: `[vocabulary, hidden]`; the embedding's table where the two are tied.
        soft_cap: logits become `soft_cap * tanh(logit / soft_cap)`; 0: they stay.
        scale: of logits, applied once to a copy of the weight: exactly, where it is a power of two.
        widths: tokens of each rank, where ranks share the vocabulary: rank 0 then returns the logits of all.
    """

    def __init__(
        self, source: WeightSource, weight: Weight, soft_cap: float = 0.0, scale: float = 1.0,
        widths: Sequence[int] = (),
    ) -> None:
        self._gather = functools.partial(source.group.gather, widths=widths) if widths else None
        self._kernels = source.kernels
        self._product = source.kernels.head(weight * scale if isinstance(weight, Tensor) and scale != 1.0 else weight)
        self.soft_cap = soft_cap
        self.bytes = source.kernels.head_bytes(weight)

    def __call__(self, x: Tensor) -> Tensor:
        logits = self._product(x)
        logits = self._kernels.soft_cap(logits, self.soft_cap) if self.soft_cap else logits
        return logits if self._gather is None else self._gather(logits)


@dataclass(frozen=True, slots=True)
class EndOptions:
    """What a family's first and last layer do in addition to looking up and multiplying."""

    tied: bool  # the head is the embedding's table, unscaled
    scale: float = 1.0  # of the embedding
    soft_cap: float = 0.0
    logit_scale: float = 1.0
    has_head: bool = True


class Ends(NamedTuple):
    """The first and the last layer."""

    embedding: Embedding
    head: LMHead | None  # None: the model makes vectors only


def read_ends(source: WeightSource, vocab_size: int, hidden_size: int, options: EndOptions) -> Ends:
    """Embedding and head under the names that all families use."""
    size = (vocab_size, hidden_size)
    read = source.weight if options.logit_scale == 1.0 else source.tensor  # what is scaled is copied
    own, cuts, widths = range(vocab_size), NO_CUTS, []
    if source.group.size > 1:
        own, widths = share(vocab_size, source.group, "tokens"), shares(vocab_size, source.group)
        cuts = dict.fromkeys((TABLE, HEAD), Cut((own,)))
    table = read({TABLE: size}, cuts)
    weight = table if options.tied or not options.has_head else read({HEAD: size}, cuts)
    assert not isinstance(table, StackedMatrix)  # of several names
    if source.group.size > 1 and not isinstance(table, Tensor):
        raise CheckpointError("a quantized embedding is not supported with tensor_parallel_size: divide the layers by "
                              "pipeline_parallel_size")
    embedding = Embedding(source, table, options.scale, own.start)
    if options.tied and not isinstance(table, Tensor):
        embedding.bytes = 0  # kernels share what they packed for the head
    if not options.has_head:
        return Ends(embedding, None)
    return Ends(embedding, LMHead(source, weight, options.soft_cap, options.logit_scale, widths))


HEAD_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "": lambda x: x, "tanh": torch.tanh, "relu": torch.relu, "gelu": functional.gelu, "silu": functional.silu,
    "gelu_pytorch_tanh": functools.partial(functional.gelu, approximate="tanh"), "sigmoid": torch.sigmoid}
"""Activations between the products of heads, by their names in configs."""


class PooledHead:
    """Computes labels, or another vector, from pooled hidden states, a few rows in a step.

    Args:
        parts: products and norms, each with the name of the activation behind it.
    """

    def __init__(self, *parts: tuple[HeadPart, str]) -> None:
        self._parts = parts
        self.bytes = sum(part.bytes for part, _ in parts)

    def __call__(self, x: Tensor) -> Tensor:
        """`[rows, hidden] -> [rows, outputs]`."""
        for part, activation in self._parts:
            x = HEAD_ACTIVATIONS[activation](part(x))
        return x


class HeadPart(Protocol):
    """A product, or a norm."""

    bytes: int

    def __call__(self, x: Tensor, /) -> Tensor: ...


def read_dense(module: DenseFields, source: WeightSource) -> PooledHead:
    """A `Dense` module of sentence-transformers, whose weights lie in a folder of its own."""
    linear = Linear(source, {f"{module.folder}.linear": module.outputs}, module.inputs, bias=module.bias, is_exact=True)
    return PooledHead((linear, module.activation))
