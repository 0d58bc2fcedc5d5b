"""The decoder of all families, on flat batches (see `kernels/interface.py`): only attention tells rows apart.

    embed ─► norm
    a layer: q,k,v ─► rotate, store ─► attend ─► project ─► add, norm ─► gate,up,silu·mul ─► down ─► add, norm
    head

A family composes the layers (`families/`); the decoder runs them, with each norm fused to the sum before it.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from slotwise.kernels.group import ALONE, Group
from slotwise.kernels.interface import AttentionShape, Kernels, LayerCache, RaggedBatch
from slotwise.model.adapters import Adapters
from slotwise.model.cache_groups import by_layer
from slotwise.model.config import ModelConfig
from slotwise.model.families import compose
from slotwise.model.layers.moe import MixtureOfExperts
from slotwise.model.layers.rope import RotaryTable
from slotwise.model.layers.source import Source
from slotwise.model.network import DecoderLayer
from slotwise.model.stored import Read

FLOAT32 = 4  # bytes of a logit that the sampler edits


class Decoder:
    """A model ready to run steps.  It holds weights and no request state; caches belong to the caller."""

    def __init__(
        self, config: ModelConfig, read: Read, kernels: Kernels, max_positions: int, adapters: Adapters | None = None,
        group: Group = ALONE,
    ) -> None:
        """Reads and packs the weights of this rank; `max_positions` (tokens) bounds the positions of a batch."""
        self.group = group
        self.config = config
        self.kernels = kernels
        self.adapters = adapters
        self._network = compose(config, Source(read, kernels, config.dtype, adapters, group))
        layers = self._network.layers
        self._rotary = {
            rope: RotaryTable(rope, config.head_dim, max_positions, kernels.device)
            for rope in dict.fromkeys(layer.attention.rope for layer in layers)}
        self._norms_after = [*(layer.attention_norm for layer in layers[1:]), self._network.norm]

    @property
    def attention_shapes(self) -> list[AttentionShape]:
        """The shapes for which the layers' caches must be allocated."""
        return [layer.attention.shape for layer in self._network.layers]

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, as packed, with those of as many adapters as fit."""
        return self._network.bytes + (self.adapters.bytes if self.adapters is not None else 0)

    @property
    def step_weight_bytes(self) -> int:
        """Bytes of weights that a step of one token reads: of experts only those that a token chooses."""
        return self._network.token_bytes

    @property
    def expert_ends(self) -> dict[int, Tensor]:
        """By layer with experts: tokens of each expert and of those before it, of all steps so far, `[experts]`."""
        return {number: layer.mlp.ends for number, layer in enumerate(self._network.layers)
                if isinstance(layer.mlp, MixtureOfExperts)}

    def reach(self, num_positions: int) -> None:
        """Compute the rotary tables for `num_positions` positions.  Call before a captured step runs again."""
        for table in self._rotary.values():
            table.until(num_positions)

    def workspace_bytes(self, num_tokens: int, num_samples: int) -> int:
        """The most bytes of activations that a step of so many tokens and sampling rows holds at a time."""
        config, network = self.config, self._network
        heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        attending = 2 * heads + 2 * config.num_heads * config.head_dim
        mlp = config.mlp_width
        hidden = (4 if network.has_post_norms else 3) * config.hidden_size
        a_token = (hidden + max(attending, mlp)) * config.dtype.itemsize
        logits = 2 if network.head.soft_cap else 1  # copies in the model's own type
        return num_tokens * a_token + num_samples * config.vocab_size * (logits * config.dtype.itemsize + FLOAT32)

    def hidden(self, batch: RaggedBatch, caches: Sequence[LayerCache]) -> Tensor:
        """Run one step: write every token to the caches, and return `[samples, hidden]`, normed, at `sample_at`.

        `caches` has one entry per layer, made by `kernels.allocate_cache` from `attention_shapes`; layers of different
        cache groups may share one.
        """
        layers = self._network.layers
        rotary = {rope: table.until(batch.max_context_len) for rope, table in self._rotary.items()}
        all_sample = len(batch.sample_at) == len(batch.token_ids)
        residual = self._network.embedding(batch.token_ids)
        x = layers[0].attention_norm(residual)
        steps = zip(layers, caches, by_layer(batch, len(layers)), self._norms_after, strict=True)
        for layer, cache, own, norm_after in steps:
            attention, is_last = layer.attention, layer is layers[-1]
            query = attention.queries(x, rotary[attention.rope], own, cache)
            if is_last and not len(batch.sample_at):
                return x[:0]  # a chunk in mid-prompt: its last keys and values are stored, and no logits are needed
            x = attention.attend(query, own, cache)
            if is_last and not all_sample:
                x, residual = x.index_select(0, batch.sample_at), residual.index_select(0, batch.sample_at)
                if self.adapters is not None:
                    self.adapters.rows.select(batch.sample_at)
            x = norm_after.add(_transformed(layer, x, residual), residual)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """`[samples, hidden] -> [samples, vocab]`, in the model's own type."""
        return self._network.head(hidden) if len(hidden) else hidden.new_empty(0, self.config.vocab_size)


def _transformed(layer: DecoderLayer, attended: Tensor, residual: Tensor) -> Tensor:
    """Add a layer's attention to the residual stream; returns what its MLP adds."""
    x = layer.attention.output(attended)
    if layer.attention_post_norm is not None:
        x = layer.attention_post_norm(x)
    x = layer.mlp(layer.mlp_norm.add(x, residual))
    return x if layer.mlp_post_norm is None else layer.mlp_post_norm(x)
