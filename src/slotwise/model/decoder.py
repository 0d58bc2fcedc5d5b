"""The decoder of all families, on flat batches (see `kernels/interface.py`): only attention tells rows apart.

    embed ─► norm
    a layer: q,k,v ─► rotate, store ─► attend ─► project ─► add, norm ─► gate,up,silu·mul ─► down ─► add, norm
    head
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

from torch import Tensor

from slotwise.kernels.interface import AttentionShape, Kernels, LayerCache, Linear, QKNorm, RaggedBatch
from slotwise.model.config import ModelConfig
from slotwise.model.rope import RotaryTable
from slotwise.model.weights import Read

Pack = Callable[[Tensor, Tensor | None], Linear]
FLOAT32 = 4  # bytes of a logit that the sampler edits


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's packed weights.  Each norm belongs to the sum before it, so that both run as one kernel."""

    qkv: Linear  # [tokens, hidden] -> [tokens, (heads + 2 * kv_heads) * head_dim]
    qk_norm: QKNorm | None
    project: Linear  # [tokens, heads * head_dim] -> [tokens, hidden]
    norm_after_attention: Tensor  # [hidden]
    gated: Linear  # [tokens, hidden] -> [tokens, intermediate], silu(gate) * up
    down: Linear  # [tokens, intermediate] -> [tokens, hidden]
    norm_after_mlp: Tensor  # [hidden], the next layer's first norm or the model's last
    attention: AttentionShape


class Decoder:
    """A model ready to run steps.  It holds weights and no request state; caches belong to the caller."""

    def __init__(self, config: ModelConfig, read: Read, kernels: Kernels, max_positions: int) -> None:
        """Reads and packs the weights; `max_positions` (tokens) bounds the positions a batch may hold."""
        self.config = config
        self.kernels = kernels
        self._embedding = read("model.embed_tokens.weight")
        self._first_norm = read("model.layers.0.input_layernorm.weight")
        self._layers = [_read_layer(index, config, read, kernels) for index in range(config.num_layers)]
        self._head = kernels.head(self._embedding if config.tie_word_embeddings else read("lm_head.weight"))
        self._rotary = RotaryTable(config.rope, config.head_dim, max_positions, kernels.device)

    @property
    def attention_shapes(self) -> list[AttentionShape]:
        """The shapes for which the layers' caches must be allocated."""
        return [layer.attention for layer in self._layers]

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, as packed."""
        config, kernels = self.config, self.kernels
        kind, total = config.dtype, 0
        for name, shape in tensor_shapes(config).items():
            is_product = len(shape) == 2 and name.startswith("model.layers.")
            total += kernels.linear_bytes(*shape, kind) if is_product else prod(shape) * kind.itemsize
        head = (config.vocab_size, config.hidden_size)
        own_head = 0 if config.tie_word_embeddings else prod(head) * kind.itemsize  # counted above, unpacked
        return total + kernels.head_bytes(*head, kind) - own_head

    @property
    def step_weight_bytes(self) -> int:
        """Bytes of weights that every step reads: all but the embedding's table."""
        config = self.config
        return self.weight_bytes - config.vocab_size * config.hidden_size * config.dtype.itemsize

    def reach(self, num_positions: int) -> None:
        """Compute the rotary table for `num_positions` positions.  Call before a captured step runs again."""
        self._rotary.until(num_positions)

    def workspace_bytes(self, num_tokens: int, num_samples: int) -> int:
        """The most bytes of activations that a step of so many tokens and sampling rows holds at a time."""
        config = self.config
        heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        attending = 2 * heads + 2 * config.num_heads * config.head_dim
        mlp = 3 * config.intermediate_size
        a_token = (3 * config.hidden_size + max(attending, mlp)) * config.dtype.itemsize
        return num_tokens * a_token + num_samples * config.vocab_size * (config.dtype.itemsize + FLOAT32)

    def hidden(self, batch: RaggedBatch, caches: Sequence[LayerCache]) -> Tensor:
        """Run one step: write every token to the caches, and return `[samples, hidden]`, normed, at `sample_at`.

        `caches` has one entry per layer, made by `kernels.allocate_cache` from `attention_shapes`.
        """
        kernels, eps, rotary = self.kernels, self.config.rms_norm_eps, self._rotary.until(batch.max_context_len)
        last = self._layers[-1]
        residual = kernels.embed(self._embedding, batch.token_ids)
        all_sample = len(batch.sample_at) == len(batch.token_ids)
        x = kernels.rms_norm(residual, self._first_norm, eps)
        for layer, cache in zip(self._layers, caches, strict=True):
            query = kernels.rotary_store(layer.qkv(x), rotary, batch, cache, layer.attention, layer.qk_norm)
            if layer is last and not len(batch.sample_at):
                return x[:0]  # a chunk in mid-prompt: its last keys and values are stored, and no logits are needed
            x = kernels.attention(query, cache, batch, layer.attention)
            if layer is last and not all_sample:
                x, residual = x.index_select(0, batch.sample_at), residual.index_select(0, batch.sample_at)
            x = kernels.add_rms_norm(layer.project(x), residual, layer.norm_after_attention, eps)
            x = layer.down(layer.gated(x))
            x = kernels.add_rms_norm(x, residual, layer.norm_after_mlp, eps)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """`[samples, hidden] -> [samples, vocab]`, in the model's own type."""
        return self._head(hidden) if len(hidden) else hidden.new_empty(0, self.config.vocab_size)


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a decoder with this config reads, by its name in the checkpoint."""
    hidden, vocabulary = config.hidden_size, config.vocab_size
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocabulary, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (vocabulary, hidden)
    for index in range(config.num_layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in _layer_shapes(config).items()}
    return shapes


def _layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, intermediate = config.hidden_size, config.intermediate_size
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    products = {
        "self_attn.q_proj": (query, hidden, config.qkv_bias),
        "self_attn.k_proj": (key, hidden, config.qkv_bias),
        "self_attn.v_proj": (key, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, query, config.output_bias),
        "mlp.gate_proj": (intermediate, hidden, config.mlp_bias),
        "mlp.up_proj": (intermediate, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, intermediate, config.mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    for name, (rows, columns, biased) in products.items():
        shapes[f"{name}.weight"] = (rows, columns)
        if biased:
            shapes[f"{name}.bias"] = (rows,)
    if config.qk_norm:
        shapes |= {f"self_attn.{name}_norm.weight": (config.head_dim,) for name in "qk"}
    return shapes


def _read_layer(index: int, config: ModelConfig, read: Read, kernels: Kernels) -> Layer:
    """Read, fuse and pack.  The unpacked tensors are freed here: memory never holds more than one layer twice."""
    prefix = f"model.layers.{index}."

    def product(*names: str, biased: bool, pack: Pack = kernels.linear) -> Linear:
        weight = read(*(f"{prefix}{name}_proj.weight" for name in names))
        return pack(weight, read(*(f"{prefix}{name}_proj.bias" for name in names)) if biased else None)

    def norms() -> QKNorm:
        query, key = (read(f"{prefix}self_attn.{name}_norm.weight") for name in "qk")
        return QKNorm(query, key, config.rms_norm_eps)

    following = index + 1
    return Layer(
        qkv=product("self_attn.q", "self_attn.k", "self_attn.v", biased=config.qkv_bias),
        qk_norm=norms() if config.qk_norm else None,
        project=product("self_attn.o", biased=config.output_bias),
        norm_after_attention=read(f"{prefix}post_attention_layernorm.weight"),
        gated=product("mlp.gate", "mlp.up", biased=config.mlp_bias, pack=kernels.gated),
        down=product("mlp.down", biased=config.mlp_bias),
        norm_after_mlp=read(
            f"model.layers.{following}.input_layernorm.weight" if following < config.num_layers else "model.norm.weight"
        ),
        attention=AttentionShape(
            config.num_heads, config.num_kv_heads, config.head_dim, config.head_dim**-0.5, config.windows[index]
        ),
    )
