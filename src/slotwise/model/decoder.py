"""The decoder of all families, on flat batches (see `kernels/interface.py`): only attention tells rows apart.

    embed ─► norm
    a layer: q,k,v ─► rotate, store ─► attend ─► project ─► add, norm ─► gate,up,silu·mul ─► down ─► add, norm
    head

A family composes the layers (`families/`); the decoder runs them, with each norm fused to the sum before it.  A layer
with a recurrent state advances it where others store keys and values.  Where the layers are divided into stages
(`kernels/group.py`), the decoder runs those of one, between the stages before and after.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from slotwise.kernels.group import ALONE, Group
from slotwise.kernels.interface import AttentionShape, Kernels, LayerCache, LayerShape, RaggedBatch
from slotwise.kernels.matrix import Format
from slotwise.model.family_table import compose
from slotwise.model.layer_groups import by_layer
from slotwise.model.layers.attention import Again
from slotwise.model.layers.mlp import MixtureOfExperts
from slotwise.model.layers.rope import RotaryTable
from slotwise.model.layers.source import WeightSource, heads_of
from slotwise.model.lora_weights import LoraWeights
from slotwise.model.model_config import ModelConfig
from slotwise.model.network import DecoderLayer, Network, layers_of
from slotwise.model.stored_tensors import Read

FLOAT32 = 4  # bytes of a logit that the sampler edits


class Advanced(NamedTuple):
    """A layer whose recurrent states a step has advanced."""

    layer: int
    again: Again


class DecoderSizes:
    """What a decoder takes and what its layers keep, which is known before its weights are read.

    Args:
        network: its layers, with weights or without.
        formats: of the quantised matrices of all ranks, by name.
    """

    def __init__(
        self, config: ModelConfig, kernels: Kernels, network: Network, adapters: LoraWeights | None = None,
        group: Group = ALONE, formats: Mapping[str, Format] = {},
    ) -> None:
        self.config = config
        self.kernels = kernels
        self.adapters = adapters
        self.group = group
        self.formats = formats
        self._network = network

    @property
    def layer_shapes(self) -> list[LayerShape]:
        """The shapes for which the caches of all the model's layers must be allocated."""
        shapes = map(self.config.layer_shape, range(self.config.num_layers))
        return [heads_of(shape, self.group).shape if isinstance(shape, AttentionShape) else shape for shape in shapes]

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, as packed, with those of as many adapters as fit."""
        return self._network.bytes + (self.adapters.bytes if self.adapters is not None else 0)

    def workspace_bytes(self, num_tokens: int, num_samples: int) -> int:
        """The most bytes of activations that a step of so many tokens and sampling rows holds at a time."""
        config, network = self.config, self._network
        heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        attending = max(2 * heads + 2 * config.num_heads * config.head_dim, config.recurrent_width)
        mlp = config.mlp_width
        hidden = (4 if network.has_post_norms else 3) * config.hidden_size
        a_token = (hidden + max(attending, mlp)) * config.dtype.itemsize
        logits = 2 if config.logit_soft_cap else 1  # copies in the model's own type
        return num_tokens * a_token + num_samples * config.vocab_size * (logits * config.dtype.itemsize + FLOAT32)


class Decoder(DecoderSizes):
    """A model ready to run steps.  It holds weights and no request state; caches belong to the caller."""

    def __init__(
        self, config: ModelConfig, read: Read, kernels: Kernels, max_positions: int,
        adapters: LoraWeights | None = None, group: Group = ALONE, formats: Mapping[str, Format] = {},
    ) -> None:
        """Reads and packs the weights of this rank; `max_positions` (tokens) bounds the positions of a batch."""
        network = compose(config, WeightSource(read, kernels, config.dtype, adapters, group, formats))
        super().__init__(config, kernels, network, adapters, group, formats)
        self.layers = layers_of(config, group.pipe.stage)  # those held here
        layers = self._network.layers
        self._rotary = {
            rope: RotaryTable(rope, config.head_dim, max_positions, kernels.device)
            for rope in dict.fromkeys(rope for layer in layers for rope in layer.attention.ropes)}
        self._norms_after = [*(layer.attention_norm for layer in layers[1:]), self._network.norm]

    @property
    def step_weight_bytes(self) -> int:
        """Bytes of weights that a step of one token reads: of experts only those that a token chooses."""
        return self._network.token_bytes

    @property
    def expert_ends(self) -> dict[int, Tensor]:
        """By layer with experts: tokens of each expert and of those before it, of all steps so far, `[experts]`; of
        the layers that are held here.
        """
        return {number: layer.mlp.ends for number, layer in zip(self.layers, self._network.layers, strict=True)
                if isinstance(layer.mlp, MixtureOfExperts)}

    def reach(self, num_positions: int) -> None:
        """Compute the rotary tables for `num_positions` positions.  Call before a captured step runs again."""
        for table in self._rotary.values():
            table.until(num_positions)

    def hidden(
        self, batch: RaggedBatch, caches: Sequence[LayerCache], advanced: list[Advanced] | None = None,
    ) -> Tensor:
        """Run one step: write every token to the caches, and return `[samples, hidden]`, normed, at `sample_at`.

        `caches` has one entry per layer, made by `kernels.allocate_cache` from `layer_shapes`; layers of different
        cache groups may share one.  `advanced` takes the layers with recurrent states, and with them the memory of what
        advanced these.  A stage hands on what it returns: before the last one `[tokens, hidden]`, not
        normed.
        """
        layers, pipe = self._network.layers, self.group.pipe
        rotary = {rope: table.until(batch.max_context_len) for rope, table in self._rotary.items()}
        all_sample = len(batch.sample_at) == len(batch.token_ids)
        residual = self._embedded(batch.token_ids)
        x = layers[0].attention_norm(residual)
        views = by_layer(batch, self.config.num_layers)[self.layers.start : self.layers.stop]
        parts = zip(self.layers, layers, caches, views, self._norms_after, strict=True)
        for number, layer, cache, own, norm_after in parts:
            attention, is_last = layer.attention, pipe.stage.is_last and layer is layers[-1]
            queries = attention.queries(x, rotary, own, cache)
            if is_last and not len(batch.sample_at):  # a chunk in mid-prompt: its last keys and values are stored
                pipe.send(x[:1])  # needed by none: it says that the step is done
                return x[:0]
            if advanced is not None and queries.again is not None:
                advanced.append(Advanced(number, queries.again))
            x = attention.attend(queries, own, cache)
            if is_last and not all_sample:
                x, residual = x.index_select(0, batch.sample_at), residual.index_select(0, batch.sample_at)
                if self.adapters is not None:
                    self.adapters.rows.select(batch.sample_at)
            x = norm_after.add(_transformed(layer, x, residual), residual)
        return pipe.send(x)

    def _embedded(self, token_ids: Tensor) -> Tensor:
        """The hidden states of tokens before this stage's layers."""
        if self._network.ends is not None:
            return self._network.ends.embedding(token_ids)
        return self.group.pipe.receive(len(token_ids), self.config.hidden_size, self.config.dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        """`[samples, hidden] -> [samples, vocab]`, in the model's own type; on the first stage alone.

        Without a head zeros: requests that sample are refused, and the steps of the warm-up compare no numbers.
        """
        assert self._network.ends is not None
        head = self._network.ends.head
        if head is None or not len(hidden):
            return hidden.new_zeros(len(hidden), self.config.vocab_size)
        return head(hidden)


class Returned:
    """The end of a model whose layers are divided into stages: what the last one returns, and the head.

    It stands in place of the decoder where the first stage samples.
    """

    adapters: LoraWeights | None = None

    def __init__(self, decoder: Decoder) -> None:
        self.config, self.kernels, self.group = decoder.config, decoder.kernels, decoder.group
        self.logits = decoder.logits

    def reach(self, num_positions: int) -> None:
        """No layer is here."""

    def hidden(self, batch: RaggedBatch, caches: Sequence[LayerCache]) -> Tensor:
        """What the last stage returns for the step: `[samples, hidden]`, normed."""
        rows = len(batch.sample_at)
        x = self.group.pipe.receive(max(1, rows), self.config.hidden_size, self.config.dtype)
        return x if rows else x[:0]


def _transformed(layer: DecoderLayer, attended: Tensor, residual: Tensor) -> Tensor:
    """Add a layer's attention to the residual stream; returns what its MLP adds."""
    x = layer.attention.output(attended)
    if layer.attention_post_norm is not None:
        x = layer.attention_post_norm(x)
    x = layer.mlp(layer.mlp_norm.add(x, residual))
    return x if layer.mlp_post_norm is None else layer.mlp_post_norm(x)
