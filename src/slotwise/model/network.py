"""Which layers each stage of a model holds.

Stages read about as many bytes of weights for a token each, the first with the head's among them, so that none of them
waits long for another:

    4 layers, the head as large as two    | head 0 | 1 2 3 |


What a family composes: the layers of a decoder-only transformer, in order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from slotwise.errors import CheckpointError
from slotwise.kernels.group import Stage
from slotwise.kernels.interface import LayerCache, RaggedBatch
from slotwise.model.layers.attention import Queries
from slotwise.model.layers.embedding_and_head import EndOptions, Ends, read_ends
from slotwise.model.layers.linear import Linear
from slotwise.model.layers.norm import NoNorm, NormOptions, RMSNorm
from slotwise.model.layers.rope import Rope
from slotwise.model.layers.source import WeightSource
from slotwise.model.model_config import ModelConfig


def layers_of(config: ModelConfig, stage: Stage) -> range:
    """The layers of a stage, at least one.

    Raises:
        CheckpointError: the model has fewer layers than there are stages.
    """
    number, count = config.num_layers, stage.total
    if count == 1:
        return range(number)
    if number < count:
        raise CheckpointError(f"pipeline_parallel_size {count}: the model has {number} layers, fewer than stages: "
                              "lower it")
    head = config.vocab_size * config.hidden_size / (config.layer_weights / number)  # in layers
    ends = [0]
    for index in range(1, count):
        even = round(index * (number + head) / count - head)
        ends.append(min(max(even, ends[-1] + 1), number - (count - index)))
    return range(*[*ends, number][stage.number : stage.number + 2])


class TokenMixer(Protocol):
    """What lets a token see those before it: attention, or a recurrent state."""

    bytes: int  # of the weights, as packed
    ropes: tuple[Rope, ...]  # whose rotary tables it reads
    output: Linear  # of the result to the hidden state

    def queries(self, x: Tensor, rotary: Mapping[Rope, Tensor], batch: RaggedBatch, cache: LayerCache) -> Queries:
        """Write what later tokens need of `x [tokens, hidden]` to the cache."""
        ...

    def attend(self, queries: Queries, batch: RaggedBatch, cache: LayerCache) -> Tensor:
        """The input of `output`, `[tokens, ...]`."""
        ...


class MLP(Protocol):
    """`[tokens, hidden] -> [tokens, hidden]`."""

    bytes: int  # of the weights, as packed
    token_bytes: int  # of those that one token reads

    def __call__(self, x: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Attention and MLP, each added to the residual stream: `x += post_norm(f(norm(x)))`; most have no `post_norm`."""

    attention_norm: RMSNorm | NoNorm
    attention: TokenMixer
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
    """A model, or one of its stages: the first has the ends, the last the norm behind all layers."""

    ends: Ends | None
    layers: Sequence[DecoderLayer]
    norm: RMSNorm | NoNorm

    @property
    def bytes(self) -> int:
        """Bytes of the weights, as packed; a tied head counts beside the embedding."""
        ends = 0 if self.ends is None else self.ends.embedding.bytes
        ends += 0 if self.ends is None or self.ends.head is None else self.ends.head.bytes
        return ends + sum(layer.bytes for layer in self.layers) + self.norm.bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of the weights that a step of one token reads: all but the embedding's and those of other experts."""
        unread = sum(layer.mlp.bytes - layer.mlp.token_bytes for layer in self.layers)
        return self.bytes - (0 if self.ends is None else self.ends.embedding.bytes) - unread

    @property
    def has_post_norms(self) -> bool:
        """Whether a layer's results are normed before they are added."""
        return any(layer.attention_post_norm or layer.mlp_post_norm for layer in self.layers)


def read_network(
    config: ModelConfig, source: WeightSource, layer: Callable[[int], DecoderLayer], ends: EndOptions,
    norms: NormOptions,
) -> Network:
    """Reads the stage of a model that `source` is for; `layer` reads the one of a number."""
    stage = source.group.pipe.stage
    ends = replace(ends, has_head=config.has_head)
    read = read_ends(source, config.vocab_size, config.hidden_size, ends) if stage.is_first else None
    layers = [layer(index) for index in layers_of(config, stage)]
    norm = RMSNorm(source, "model.norm", config.hidden_size, norms) if stage.is_last else NoNorm(source)
    return Network(read, layers, norm)
