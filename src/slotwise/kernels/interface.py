"""The contract between a model and the kernels that compute it, one implementation per device.

A step arrives as a *ragged batch*: the tokens of every row laid end to end, nothing padded.  Linear layers, norms and
activations run over all tokens at once; attention runs per row over the row's block table.  That is Orca's selective
batching (Yu et al., OSDI 2022) over vLLM's paged memory (Kwon et al., SOSP 2023).

    rows          A (decode)   B (chunk of 3)   C (decode)
    tokens        [ a ]        [ b0 b1 b2 ]     [ c ]
    query_starts   0            1                4            5
    context_lens   7            3                12           (tokens in the cache once this step's are written)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, device, dtype, float8_e4m3fn, int8

Linear = Callable[[Tensor], Tensor]
"""A packed product: `[tokens, in] -> [tokens, out]`, bias included."""

LayerCache = Any
"""One layer's keys and values; its layout belongs to the kernels that made it."""

CACHE_KINDS: dict[str, dtype | None] = {"auto": None, "int8": int8, "fp8": float8_e4m3fn}
"""What a cache may hold, by its name for users; None: what the model computes in.

int8 comes with a scale for each token and head.  fp8 is stored as it is, and what is larger than FP8_LARGEST as that.
"""

FP8_LARGEST = 448.0  # of four bits of exponent and three of fraction (Micikevicius et al., 2022)


def cache_kind(name: str, device: str, kept: Sequence[str]) -> dtype | None:
    """What `CACHE_KINDS` says of `name`, which is one of those `kept` on a device.

    Raises:
        ValueError: it is none of them.
    """
    if name not in kept:
        raise ValueError(f"kv_cache_dtype must be {' or '.join(kept)} on device {device}, not {name!r}")
    return CACHE_KINDS[name]


def as_bytes(x: Tensor) -> Tensor:
    """`x` itself, or where its elements are bytes that torch does not index, a view of them as bytes that it does."""
    return x.view(int8) if x.itemsize == 1 else x


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """One step, flat.  All tensors live on the kernels' device.

    A row's new tokens stand at positions `context_len - query_len ... context_len - 1`; token t's key and value are
    written to cache place `slot_mapping[t] = block * block_size + offset` before the row attends.
    """

    token_ids: Tensor  # [tokens] int64
    positions: Tensor  # [tokens] int64, position of each token in its own sequence
    slot_mapping: Tensor  # [tokens] int64
    query_starts: Tensor  # [rows + 1] int32, where each row's tokens begin
    context_lens: Tensor  # [rows] int32
    block_tables: Tensor  # [rows, width] int32, entries past a row's context are undefined but in range
    sample_at: Tensor  # [samples] int64, flat token indices whose logits are wanted
    max_query_len: int  # longest row of this step, in tokens
    max_context_len: int


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What attention needs to know about a layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int = 0  # tokens a query may look back on, itself included; 0: no limit


@dataclass(frozen=True, slots=True)
class QKNorm:
    """RMS norms over each head's query and key before the rotary embedding (Qwen3)."""

    query: Tensor  # [head_dim]
    key: Tensor  # [head_dim]
    eps: float


class Graph(Protocol):
    """Work that can be done again on what then stands in the same memory."""

    @property
    def result(self) -> Tensor:
        """What it yielded; it holds until any recording is run."""
        ...

    def run(self) -> Tensor:
        """Do it again, and return its result."""
        ...


class Kernels(Protocol):
    """Everything a decoder layer computes.  Implementations hold no request state."""

    name: str
    device: device  # where all tensors live
    kinds: tuple[dtype, ...]  # that weights may have

    def warm_up(self, kind: dtype) -> None:
        """Have everything for weights of one type ready before the first request needs it."""
        ...

    def product_path(self, kind: dtype) -> str:
        """The name of what multiplies with weights of `kind`, for people and bug reports."""
        ...

    def operations_per_second(self, kind: dtype) -> float:
        """Roughly, in large products: what the size of a step is chosen by where nobody says."""
        ...

    def allocate_cache(self, num_blocks: int, block_size: int, shape: AttentionShape, kind: dtype) -> LayerCache:
        """One layer's zeroed cache of `num_blocks` blocks of `block_size` tokens, for a model that computes in `kind`.

        What it holds of keys and values is the kernels' choice, made when they are.
        """
        ...

    def cache_bytes_per_block(self, block_size: int, shape: AttentionShape, kind: dtype) -> int:
        """Bytes one block takes in one layer, keys and values together, and whatever is kept to read them by."""
        ...

    def cache_pieces(self, cache: LayerCache) -> tuple[Tensor, ...]:
        """All that a layer's cache holds, as views `[blocks, ...]`, contiguous: what is copied when blocks move."""
        ...

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """Pack `weight [out, in]` once, for many products."""
        ...

    def gated(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """Pack `weight [2 * intermediate, in]`, gates first, once for many `silu(gate) * up`: `[tokens, intermediate]`.

        It takes as many bytes as `linear` does.
        """
        ...

    def head(self, weight: Tensor) -> Linear:
        """Pack `weight [vocab, hidden]` for logits."""
        ...

    def linear_bytes(self, outputs: int, depth: int, kind: dtype) -> int:
        """Bytes that a packed `linear` takes."""
        ...

    def head_bytes(self, outputs: int, depth: int, kind: dtype) -> int:
        """Bytes that a packed `head` takes."""
        ...

    def library_bytes(self, kind: dtype) -> int:
        """Bytes of host memory that a library keeps at most for products with weights of `kind`, beside the weights."""
        ...

    def graph_size(self, rows: int, context: int) -> tuple[int, int]:
        """Rows and tokens of context for which a decode step is recorded that is to serve so many.

        No rows where running a step again gains nothing.  Never fewer for more rows, nor for more context.
        """
        ...

    def record(self, work: Callable[[], Tensor]) -> Graph | None:
        """Do `work`, which starts these kernels and nothing else, so that it can be run again without being called.

        None, and `work` was not done, where that is not possible.
        """
        ...

    def embed(self, table: Tensor, token_ids: Tensor) -> Tensor:
        """Rows of `table [vocabulary, hidden]` by `token_ids [tokens]` int64: `[tokens, hidden]`."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMSNorm over the last dimension of `x [tokens, hidden]`."""
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`residual += x` in place, then RMSNorm of the sum: `[tokens, hidden]`."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """`silu(gate) * up` for `gate_up [tokens, 2 * intermediate]`."""
        ...

    def rotary_store(
        self, qkv: Tensor, rotary: Tensor, batch: RaggedBatch, cache: LayerCache, shape: AttentionShape,
        norm: QKNorm | None,
    ) -> Tensor:
        """Split `qkv [tokens, (heads + 2 * kv_heads) * head_dim]`, norm and rotate q and k, write k and v to the cache.

        `rotary [max_positions, head_dim]` float32 holds cosines in its first half and sines in its second, for the
        half-split ("rotate half") layout of Hugging Face checkpoints.  Returns the queries `[tokens, heads, head_dim]`.
        """
        ...

    def attention(self, query: Tensor, cache: LayerCache, batch: RaggedBatch, shape: AttentionShape) -> Tensor:
        """Causal attention of every row over its own cached context: `[tokens, heads * head_dim]`."""
        ...


def in_two_steps(kernels: Kernels, weight: Tensor, bias: Tensor | None) -> Linear:
    """`gated` of kernels that multiply first, and gate what they have stored."""
    product = kernels.linear(weight, bias)
    return lambda x: kernels.silu_mul(product(x))
