"""Compressed attention (multi-head latent attention; DeepSeek-AI, "DeepSeek-V2", 2024).

    x ─► q_a ─► norm ─► q_b ─┐  (or one product, q)
    x ─► kv_a ───────────────┴─► norm the latent, rotate, store ─► attend over latents ─► output
         Linear                  one kernel, `latent_store`        `latent_attention`      Linear

`kv_b_proj` makes keys and values of every head from a latent.  It is not one product here: kernels get its two
halves, of keys and of values, and absorb them (`LatentShape` in `compute/kernels/interface.py`).  Ranks divide the
heads, and each of them computes and caches all latents.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from slotwise.compute.kernels.interface import LatentNorm, LatentShape
from slotwise.compute.model.layers.attention import LayerStep
from slotwise.compute.model.layers.linear import Linear
from slotwise.compute.model.layers.norm import NormOptions, RMSNorm
from slotwise.compute.model.layers.rank_weights import NO_CUTS, WeightSource, latent_heads
from slotwise.compute.model.layers.rope import Rope
from slotwise.compute.model.stored_tensors import Cut


class Indexers(NamedTuple):
    """Sizes of what selects the tokens that queries attend to."""

    num_heads: int
    head_dim: int
    layers: tuple[bool, ...]  # whether each layer has one; others use the selection of a layer before them


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Sizes of compressed attention and of what is before it."""

    shape: LatentShape  # of all ranks together
    query_rank: int  # of queries, which are products of a normed vector; 0: of the hidden state itself
    norm_eps: float = 1e-6  # of the norms of latents and of such vectors
    latent_factor: float = 1.0  # of latents behind their norm
    is_split: bool = False  # what makes keys and values of latents, by heads: `k_b_proj` transposed, and `v_b_proj`
    indexers: Indexers | None = None  # which select every token in the contexts that are served


class LatentAttention:
    """The attention called `name` in the checkpoint; `bias` is that of q_a, kv_a and output."""

    def __init__(
        self, source: WeightSource, name: str, latent: LatentConfig, rope: Rope, hidden_size: int, *,
        bias: bool = False,
    ) -> None:
        whole = latent.shape
        heads, self.shape = latent_heads(whole, source.group)
        self.ropes = (rope,)
        self._kernels = source.kernels

        def of_heads(size: int) -> Cut:
            return Cut((range(heads.start * size, heads.stop * size),))

        is_shared = source.group.size > 1
        query = f"{name}.q_b_proj" if latent.query_rank else f"{name}.q_proj"
        cuts = {query: of_heads(whole.query_dim)} if is_shared else NO_CUTS
        self._compressed_query = None
        if latent.query_rank:
            self._compressed_query = Linear(source, {f"{name}.q_a_proj": latent.query_rank}, hidden_size, bias=bias)
            self._query_norm = RMSNorm(source, f"{name}.q_a_layernorm", latent.query_rank, NormOptions(latent.norm_eps))
        self._query = Linear(
            source, {query: whole.num_heads * whole.query_dim}, latent.query_rank or hidden_size, cuts=cuts)
        self._compressed = Linear(source, {f"{name}.kv_a_proj_with_mqa": whole.width}, hidden_size, bias=bias)
        norm = source.tensor({f"{name}.kv_a_layernorm.weight": (whole.rank,)}).float() * latent.latent_factor
        self._norm = LatentNorm(norm, latent.norm_eps)
        key_up, value_up = _read_split(source, name, whole, heads) if latent.is_split else _read(
            source, name, whole, heads)
        self._products = source.kernels.latent_products(key_up, value_up)
        columns = of_heads(whole.value_dim).rows
        self.output = Linear(
            source, {f"{name}.o_proj": hidden_size}, whole.num_heads * whole.value_dim, bias=bias,
            cuts={f"{name}.o_proj": Cut(columns=columns[0])} if is_shared and columns else NO_CUTS)
        self.bytes = self._query.bytes + self._compressed.bytes + self.output.bytes + norm.nbytes
        self.bytes += key_up.nbytes + value_up.nbytes
        if self._compressed_query is not None:
            self.bytes += self._compressed_query.bytes + self._query_norm.bytes

    def __call__(self, x: Tensor, step: LayerStep) -> Tensor:
        """`[tokens, hidden] -> [kept tokens, hidden]`."""
        query = self.store(x, step)
        out = self._kernels.latent_attention(query, step.cache, step.batch, self.shape, self._products)
        return self.output(step.kept(out))

    def store(self, x: Tensor, step: LayerStep) -> Tensor:
        """Write latents and rotary keys to the cache; returns the queries `[tokens, heads * query_dim]`."""
        compressed = self._compressed(x)
        query = x if self._compressed_query is None else self._query_norm(self._compressed_query(x))
        return self._kernels.latent_store(
            self._query(query), compressed, step.rotary[self.ropes[0]], step.batch, step.cache, self.shape, self._norm)


def _read(source: WeightSource, name: str, shape: LatentShape, heads: range) -> tuple[Tensor, Tensor]:
    """What makes keys of latents, `[heads, nope_dim, rank]`, and values, `[heads, value_dim, rank]`, of these heads."""
    stored, both = f"{name}.kv_b_proj.weight", shape.nope_dim + shape.value_dim
    cuts = NO_CUTS if len(heads) == shape.num_heads else {stored: Cut((range(heads.start * both, heads.stop * both),))}
    up = source.tensor({stored: (shape.num_heads * both, shape.rank)}, cuts).view(len(heads), both, shape.rank)
    return up[:, : shape.nope_dim], up[:, shape.nope_dim :]


def _read_split(source: WeightSource, name: str, shape: LatentShape, heads: range) -> tuple[Tensor, Tensor]:
    """The same of weights that are stored by heads, those of keys transposed."""
    sizes = {"k_b_proj": (shape.rank, shape.nope_dim), "v_b_proj": (shape.value_dim, shape.rank)}
    key, value = (
        source.tensor({f"{name}.{part}.{head}.weight": size for head in range(shape.num_heads)}).view(-1, *size)
        for part, size in sizes.items())
    return key[heads.start : heads.stop].transpose(1, 2), value[heads.start : heads.stop]
