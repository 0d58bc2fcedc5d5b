"""The first and the last layer: from token ids to hidden states, and from these to logits, labels or vectors.

    token ids ─► row of the table ─► projected ─► + rows of the tables of types and of positions ─► normed
    logits    ◄─ head, bias ◄─ projected ◄─ hidden states

Most families only look up and multiply.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from slotwise.compute.kernels.interface import Activation
from slotwise.compute.kernels.matrix import QuantizedMatrix, StackedMatrix, Weight
from slotwise.compute.model.layers.linear import Linear
from slotwise.compute.model.layers.norm import LayerNorm, LayerNormOptions, NormOptions, RMSNorm
from slotwise.compute.model.layers.rank_weights import NO_CUTS, WeightSource, share, shares
from slotwise.compute.model.sentence_modules import DenseFields
from slotwise.compute.model.stored_tensors import Cut
from slotwise.errors import CheckpointError

TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"  # in the checkpoints of all families
BIAS, POSITIONS, TYPES = "lm_head.bias", "model.embed_positions.weight", "model.embed_types.weight"
TRANSFORM, TRANSFORM_NORM = "lm_head.dense", "lm_head.layer_norm"
NORM, INWARD, OUTWARD = "model.embed_norm", "model.project_in", "model.project_out"
LAST = "model.embed_projection"

Positions = Callable[[WeightSource], Tensor]
"""Reads or computes what is added to the embedding at each position: `[positions, hidden]`."""


def learned_positions(source: WeightSource, count: int, hidden_size: int, offset: int = 0) -> Tensor:
    """A table of `count` positions from the checkpoint, which begins with `offset` rows that no position has."""
    table = source.tensor({POSITIONS: (offset + count, hidden_size)})
    return table[offset:].contiguous()


class TokenTypes:
    """What is added to the embedding of tokens of the first text of a prompt, and of the second one (BERT).

    A tokenizer writes a separator behind each text, so that the tokens tell them apart.

    Args:
        count: types of the table.
        separator: the token behind a text; -1: all tokens are of the first type.
    """

    def __init__(self, source: WeightSource, count: int, hidden_size: int, separator: int) -> None:
        self._kernels, self._separator = source.kernels, separator if count > 1 else -1
        self._table = source.tensor({TYPES: (count, hidden_size)})
        self.bytes = count * hidden_size * source.dtype.itemsize

    def __call__(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """`[tokens]` of whole prompts and their positions `-> [tokens, hidden]`."""
        types = self._kernels.rowwise(torch.zeros_like, token_ids) if self._separator < 0 else self._kernels.rowwise(
            self._types, token_ids, positions)
        return self._kernels.embed(self._table, types)

    def _types(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        is_separator = token_ids == self._separator
        before = is_separator.cumsum(0) - is_separator.long()  # separators in front of each token of the step
        starts = torch.where(positions == 0, before, 0).cummax(0).values  # in front of its prompt
        return (before > starts).long()


class Embedding:
    """`[tokens] -> [tokens, hidden]`, rows of `table [vocabulary, size]` times `scale`, and what is done with them.

    The scale is rounded to the type of the hidden states.  It is applied once, to a copy of a table of that type: the
    same numbers as in each step; of a quantized table, to the rows that a step reads.  Where ranks share the
    vocabulary, a rank's table begins with `first_id`, and the sum over the ranks has the row of the one that holds it.
    """

    def __init__(
        self, source: WeightSource, table: Tensor | QuantizedMatrix, scale: float = 1.0, first_id: int = 0, *,
        project: Linear | None = None, types: TokenTypes | None = None, positions: Tensor | None = None,
        norm: LayerNorm | RMSNorm | None = None, projects_last: bool = False,
    ) -> None:
        self._kernels = kernels = source.kernels
        self._project, self._types, self._positions, self._norm = project, types, positions, norm
        self._projects_last = projects_last
        factor = torch.tensor(scale, dtype=source.dtype)
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
        self.more_bytes = 0 if positions is None else positions.numel() * source.dtype.itemsize
        self.more_bytes += sum(part.bytes for part in (project, types, norm) if part is not None)

    def __call__(self, token_ids: Tensor, positions: Tensor | None = None) -> Tensor:
        """Both `[tokens]`; `positions` are read where a table of them is added."""
        x = self._reduce(self._rows(token_ids))
        if self._project is not None and not self._projects_last:
            x = self._project(x)
        if self._types is not None:
            assert positions is not None
            x = self._kernels.add(self._types(token_ids, positions), x)
        if self._positions is not None:
            assert positions is not None
            x = self._kernels.add(self._kernels.embed(self._positions, positions), x)
        x = x if self._norm is None else self._norm(x)
        return self._project(x) if self._project is not None and self._projects_last else x


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
    """`[tokens, hidden] -> [tokens, vocabulary]`, logits of the kernels' `wide_kind`.

    Args:
        weight: `[vocabulary, hidden]`; the embedding's table where the two are tied.
        soft_cap: logits become `soft_cap * tanh(logit / soft_cap)`; 0: they stay.
        scale: of logits, applied once to a copy of the weight: exactly, where it is a power of two.
        widths: tokens of each rank, where ranks share the vocabulary: rank 0 then returns the logits of all.
        bias: `[vocabulary]`.
        project: hidden states before the product.
    """

    def __init__(
        self, source: WeightSource, weight: Weight, soft_cap: float = 0.0, scale: float = 1.0,
        widths: Sequence[int] = (), *, bias: Tensor | None = None, project: HeadPart | None = None,
    ) -> None:
        self._gather = functools.partial(source.group.gather, widths=widths) if widths else None
        self._kernels = source.kernels
        self._project = project
        self._product = source.kernels.head(
            weight * scale if isinstance(weight, Tensor) and scale != 1.0 else weight, bias)
        self.soft_cap = soft_cap
        self.bytes = source.kernels.head_bytes(weight) + (0 if project is None else project.bytes)
        self.bytes += 0 if bias is None else bias.numel() * source.dtype.itemsize

    def __call__(self, x: Tensor) -> Tensor:
        logits = self._product(x if self._project is None else self._project(x))
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
    head_bias: bool = False
    positions: Positions | None = None
    token_types: int = 0  # rows of their table; 0: the model has no such table
    separator: int = -1  # as that of `TokenTypes`
    norm: LayerNormOptions | NormOptions | None = None  # of the embedding
    transform: Callable[[WeightSource], HeadPart] | None = None  # of what the head reads
    embedding_size: int = 0  # of the table and of the head's inputs, which are projected; 0: the hidden size
    projects_last: bool = False  # behind the norm; all tables have this size


class Ends(NamedTuple):
    """The first and the last layer."""

    embedding: Embedding
    head: LMHead | None  # None: the model makes vectors only


def read_ends(source: WeightSource, vocab_size: int, hidden_size: int, options: EndOptions) -> Ends:
    """Embedding and head under the names that all families use."""
    width = options.embedding_size or hidden_size
    inner = width if options.projects_last else hidden_size  # of what is added to the table's rows
    size = (vocab_size, width)
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
    project_in: Linear | None = None
    project_out: HeadPart | None = None
    if options.projects_last:
        project_in = Linear(source, {LAST: hidden_size}, width, bias=True, is_exact=True)
    elif width != hidden_size:
        project_in = Linear(source, {INWARD: hidden_size}, width, is_exact=True)
        project_out = Linear(source, {OUTWARD: width}, hidden_size, is_exact=True) if options.has_head else None
    elif options.transform is not None and options.has_head:
        project_out = options.transform(source)
    embedding = Embedding(
        source, table, options.scale, own.start, project=project_in,
        projects_last=options.projects_last,
        types=TokenTypes(source, options.token_types, inner, options.separator) if options.token_types else None,
        positions=None if options.positions is None else options.positions(source),
        norm=None if options.norm is None else options.norm.read(source, NORM, inner))
    if options.tied and not isinstance(table, Tensor):
        embedding.bytes = 0  # kernels share what they packed for the head
    if not options.has_head:
        return Ends(embedding, None)
    bias = None
    if options.head_bias:
        bias = source.tensor({BIAS: (vocab_size,)}, {BIAS: Cut((own,))} if widths else NO_CUTS) * options.logit_scale
    return Ends(embedding, LMHead(
        source, weight, options.soft_cap, options.logit_scale, widths, bias=bias, project=project_out))


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


class HeadTransform:
    """`norm(activation(dense(x)))`, between the last layer and the head of BERT (Devlin et al., 2018)."""

    def __init__(self, source: WeightSource, size: int, activation: Activation, norms: LayerNormOptions) -> None:
        self._kernels, self._activation = source.kernels, activation
        self._dense = Linear(source, {TRANSFORM: size}, size, bias=True, is_exact=True)
        self._norm = norms.read(source, TRANSFORM_NORM, size)
        self.bytes = self._dense.bytes + self._norm.bytes

    def __call__(self, x: Tensor, /) -> Tensor:
        return self._norm(self._kernels.activate(self._dense(x), self._activation))


def read_dense(module: DenseFields, source: WeightSource) -> PooledHead:
    """A `Dense` module of sentence-transformers, whose weights lie in a folder of its own."""
    linear = Linear(source, {f"{module.folder}.linear": module.outputs}, module.inputs, bias=module.bias, is_exact=True)
    return PooledHead((linear, module.activation))
