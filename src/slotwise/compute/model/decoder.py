"""The decoder of all families, on flat batches (see `compute/kernels/interface.py`): only attention tells rows apart.

    h = embedding(tokens)
    for layer in layers:
        layer.forward(h, step)      # h += attention(norm(h)),  h += mlp(norm(h))
    logits = head(norm(h))

A family's file has its layer (`families/`).  Where layers are divided into stages (`compute/kernels/group.py`), a
decoder runs the layers of one stage, between the stages before and after it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from slotwise.compute.kernels.group import SINGLE_RANK, Group
from slotwise.compute.kernels.interface import (
    AttentionShape,
    Kernels,
    LatentShape,
    LayerCache,
    LayerShape,
    RaggedBatch,
)
from slotwise.compute.kernels.matrix import Format
from slotwise.compute.model.family_table import compose
from slotwise.compute.model.layer_groups import by_layer
from slotwise.compute.model.layers.attention import LayerStep, StateAdvance
from slotwise.compute.model.layers.mlp import MixtureOfExperts
from slotwise.compute.model.layers.norm import ResidualStream
from slotwise.compute.model.layers.rank_weights import WeightSource, heads_of, latent_heads
from slotwise.compute.model.layers.rope import RotaryTable
from slotwise.compute.model.lora_weights import LoraWeights
from slotwise.compute.model.model_config import ModelConfig
from slotwise.compute.model.network import Network, layers_of
from slotwise.compute.model.stored_tensors import Read

FLOAT32 = 4  # bytes of a logit that the sampler edits


class DecoderSizes:
    """A decoder's memory and its layers' shapes, known before its weights are read.

    Args:
        network: its layers, with weights or without.
        formats: of quantized matrices, by name, on all ranks.
    """

    def __init__(
        self, config: ModelConfig, kernels: Kernels, network: Network, adapters: LoraWeights | None = None,
        group: Group = SINGLE_RANK, formats: Mapping[str, Format] = {},
    ) -> None:
        self.config = config
        self.kernels = kernels
        self.adapters = adapters
        self.group = group
        self.formats = formats
        self._network = network

    @property
    def layer_shapes(self) -> list[LayerShape]:
        """The shapes of all caches: of each layer, then the second ones of layers with two."""
        config = self.config
        shapes = [self._of_rank(config.layer_shape(layer)) for layer in range(config.num_layers)]
        return shapes if config.recurrent is None else [*shapes, *[config.recurrent.shape] * len(config.doubled_layers)]

    def _of_rank(self, shape: LayerShape) -> LayerShape:
        """The part of a shape that this rank computes."""
        if isinstance(shape, LatentShape):
            return latent_heads(shape, self.group)[1]
        return heads_of(shape, self.group).shape if isinstance(shape, AttentionShape) else shape

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, as packed, and of as many adapters as fit."""
        return self._network.bytes + (self.adapters.bytes if self.adapters is not None else 0)

    @property
    def step_weight_bytes(self) -> int:
        """Bytes of weights that a step of one token reads: only the experts that it chooses."""
        return self._network.token_bytes

    def workspace_bytes(self, num_tokens: int, num_samples: int) -> int:
        """Peak bytes of activations in a step with these numbers of tokens and sampling rows."""
        config, network = self.config, self._network
        sizes = config.layer_heads or [(config.num_kv_heads, config.head_dim)]
        attending = max(config.recurrent_width, config.latent_width, *[
            (4 * config.num_heads + 4 * kv_heads) * head_dim for kv_heads, head_dim in sizes])
        mlp = config.mlp_width
        wide = self.kernels.wide_kind(config.dtype)
        hidden = network.live_states * config.hidden_size
        a_token = (hidden + max(attending, mlp)) * config.dtype.itemsize
        a_token += config.hidden_size * (wide.itemsize - config.dtype.itemsize)
        logits = (2 if config.logit_soft_cap else 1) * wide.itemsize
        return num_tokens * a_token + num_samples * config.vocab_size * (logits + FLOAT32)


class Decoder(DecoderSizes):
    """A model ready to run steps.  It holds weights and no request state; caches belong to the caller."""

    def __init__(
        self, config: ModelConfig, read: Read, kernels: Kernels, max_positions: int,
        adapters: LoraWeights | None = None, group: Group = SINGLE_RANK, formats: Mapping[str, Format] = {},
    ) -> None:
        """Reads and packs the weights of this rank; `max_positions` (tokens) bounds the positions of a batch."""
        network = compose(config, WeightSource(read, kernels, config.dtype, adapters, group, formats))
        super().__init__(config, kernels, network, adapters, group, formats)
        self.layers = layers_of(config, group.pipe.stage)  # the layers held here
        self._last_stored = max(map(config.kv_layer, self.layers))  # the last one with keys and values of its own
        layers = self._network.layers
        self._rotary = {
            rope: RotaryTable(rope, rope.head_dim or config.head_dim, max_positions, kernels.device)
            for rope in dict.fromkeys(rope for layer in layers for rope in layer.attention.ropes)}

    @property
    def expert_ends(self) -> dict[int, Tensor]:
        """Cumulative sums over experts of the tokens routed so far, `[experts]`, by number of a layer held here.
        """
        return {number: mlp.ends for number, layer in zip(self.layers, self._network.layers, strict=True)
                for mlp in layer.mlps if isinstance(mlp, MixtureOfExperts)}

    @property
    def has_states(self) -> bool:
        """Whether layers have recurrent states."""
        return self.config.recurrent is not None

    @property
    def is_adapted(self) -> bool:
        """Whether a row of the step has an adapter."""
        return self.adapters is not None and self.adapters.rows.are_any

    def reach(self, num_positions: int) -> None:
        """Compute the rotary tables for `num_positions` positions.  Call before a captured step runs again."""
        for table in self._rotary.values():
            table.until(num_positions)

    def hidden(
        self, batch: RaggedBatch, caches: Sequence[LayerCache], advances: list[StateAdvance] | None = None,
    ) -> Tensor:
        """Run one step: write every token to the caches, and return `[samples, hidden]`, normed, at `sample_at`.

        A stage returns what it sends on; before the last one that is the stream, `[tokens, hidden]` of `wide_kind`.

        Args:
            caches: one for each of `layer_shapes`, made by `kernels.allocate_cache`; layers of different groups may
                share one.
            advances: receives how recurrent states advanced that are on trial.
        """
        network, pipe = self._network, self.group.pipe
        x = self._embedded(batch)
        wide = self.kernels.convert(x, self.kernels.wide_kind(self.config.dtype))
        h = ResidualStream(wide, self.kernels, self.config.dtype) if network.start is None else network.start(
            batch.token_ids, x)
        for layer, step in zip(network.layers, self._steps(h, batch, caches, advances), strict=True):
            if pipe.stage.is_last and step.layer == self._last_stored and not len(batch.sample_at):
                # A chunk in mid-prompt: nothing behind its last keys and values is needed.
                x = layer.attention_norm(h)
                layer.attention.store(x, step)
                pipe.send(x[:1])  # only says that the step is done
                return x[:0]
            layer.forward(h, step)
        return pipe.send(network.norm(h) if pipe.stage.is_last else h.wide())

    def _steps(
        self, h: ResidualStream, batch: RaggedBatch, caches: Sequence[LayerCache], advances: list[StateAdvance] | None,
    ) -> Iterator[LayerStep]:
        """The step as each layer sees it.  Behind the last layer's attention only rows that sample go on."""

        is_kept = False

        def kept_by_last(x: Tensor) -> Tensor:
            nonlocal is_kept
            if not is_kept:
                is_kept = True
                h.keep(batch.sample_at)
                if self.adapters is not None:
                    self.adapters.rows.select(batch.sample_at)
            return x.index_select(0, batch.sample_at)

        rotary = {rope: table.until(batch.max_context_len) for rope, table in self._rotary.items()}
        narrows = self.group.pipe.stage.is_last and len(batch.sample_at) < len(batch.token_ids)
        seconds = {layer: self.config.num_layers + at for at, layer in enumerate(self.config.doubled_layers)}
        views = by_layer(batch, self.config.num_layers + len(seconds))
        on_trial = [] if advances is None else advances
        for layer in self.layers:
            read = self.config.kv_layer(layer)
            view, cache = views[read], caches[read - self.layers.start]
            kept = kept_by_last if narrows and layer == self.layers[-1] else _every_row
            beside = None if (second := seconds.get(layer)) is None else LayerStep(
                second, views[second], caches[second], rotary, kept, on_trial)
            yield LayerStep(layer, view, cache, rotary, kept, on_trial, beside)

    def _embedded(self, batch: RaggedBatch) -> Tensor:
        """The hidden states of tokens before this stage's layers."""
        if self._network.ends is not None:
            return self._network.ends.embedding(batch.token_ids, batch.positions)
        kind = self.kernels.wide_kind(self.config.dtype)
        return self.group.pipe.receive(len(batch.token_ids), self.config.hidden_size, kind)

    def logits(self, hidden: Tensor) -> Tensor:
        """`[samples, hidden] -> [samples, vocab]`, of the kernels' `wide_kind`; on the first stage alone.

        Without a head zeros: requests that sample are refused, and the steps of the warm-up compare nothing.
        """
        assert self._network.ends is not None
        head = self._network.ends.head
        if head is None or not len(hidden):
            kind = self.kernels.wide_kind(self.config.dtype)
            return hidden.new_zeros(len(hidden), self.config.vocab_size, dtype=kind)
        return head(hidden)


    def embedded(self, pooled: Tensor) -> Tensor:
        """Vectors of pooled hidden states, `[rows, hidden] -> [rows, vector_size]`; on the first stage alone."""
        for dense in self._network.dense:
            pooled = dense(pooled)
        return pooled

    def classified(self, pooled: Tensor) -> Tensor:
        """The numbers of labels, `[rows, hidden] -> [rows, labels]`, where there is a head of labels."""
        assert self._network.classifier is not None
        return self._network.classifier(pooled)


class StepDecoder(Protocol):
    """What a runner needs of a decoder, or of the end of one: `Decoder` and `HeadStage`."""

    config: ModelConfig
    kernels: Kernels

    @property
    def has_states(self) -> bool:
        """Whether layers held here have recurrent states."""
        ...

    @property
    def is_adapted(self) -> bool:
        """Whether a row of the step has an adapter."""
        ...

    def reach(self, num_positions: int) -> None: ...

    def hidden(
        self, batch: RaggedBatch, caches: Sequence[LayerCache], advances: list[StateAdvance] | None = None,
    ) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...

    def embedded(self, pooled: Tensor) -> Tensor: ...

    def classified(self, pooled: Tensor) -> Tensor: ...


class HeadStage:
    """The end of a model whose layers are divided into stages: what the last stage returns, and the head.

    The first stage samples with it.
    """

    has_states = is_adapted = False

    def __init__(self, decoder: Decoder) -> None:
        self.config, self.kernels, self.group = decoder.config, decoder.kernels, decoder.group
        self.logits, self.embedded, self.classified = decoder.logits, decoder.embedded, decoder.classified

    def reach(self, num_positions: int) -> None:
        """No layer is here."""

    def hidden(
        self, batch: RaggedBatch, caches: Sequence[LayerCache], advances: list[StateAdvance] | None = None,
    ) -> Tensor:
        """What the last stage returns for the step: `[samples, hidden]`, normed."""
        rows = len(batch.sample_at)
        x = self.group.pipe.receive(max(1, rows), self.config.hidden_size, self.config.dtype)
        return x if rows else x[:0]


def _every_row(x: Tensor) -> Tensor:
    return x
