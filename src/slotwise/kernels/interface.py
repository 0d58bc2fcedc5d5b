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

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from torch import Tensor, device, dtype

from slotwise.kernels.delta import DeltaShape, DeltaWeights
from slotwise.kernels.low_rank import AdapterProducts
from slotwise.kernels.matrix import Format, QuantisedMatrix, Weight

Linear = Callable[[Tensor], Tensor]
"""A packed product: `[tokens, in] -> [tokens, out]`, bias included."""

Activation = Literal["silu", "gelu_tanh"]
"""Of gates: SiLU (Elfwing et al., 2017), or GELU's approximation by tanh (Hendrycks and Gimpel, 2016)."""

@dataclass(frozen=True, slots=True)
class ClampedSwiGLU:
    """The activation of gpt-oss: `(clamp(up) + 1) * g * sigmoid(alpha * g)`, with `g = min(gate, limit)`."""

    alpha: float
    limit: float  # of gates above, of what they gate on both sides


@dataclass(frozen=True, slots=True)
class Routing:
    """How a token's experts are chosen: those with the `top_k` largest of `num_experts` logits.

    Their shares are the softmax of the logits, over all experts or, normalised, over those that were chosen.
    """

    num_experts: int
    top_k: int
    is_normalised: bool
    held: range | None = None  # experts whose weights are here, those of a rank; results leave others out.  None: all

    @property
    def experts(self) -> range:
        """The experts whose weights are here."""
        return range(self.num_experts) if self.held is None else self.held


class ExpertWeights(NamedTuple):
    """Weights of one expert; all experts of a layer are stored in the same formats."""

    gate_up: Weight  # [2 * intermediate, hidden], gates first
    down: Weight  # [hidden, intermediate]
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None


Mixture = Callable[[Tensor, Tensor], Tensor]
"""Packed experts: `x [tokens, hidden], logits [tokens, experts] -> [tokens, hidden]`."""

LayerCache = Any
"""One layer's keys and values, or its states; its layout belongs to the kernels that made it."""

class GroupTables(NamedTuple):
    """What a cache group has of its own in a batch."""

    slot_mapping: Tensor
    block_tables: Tensor


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
    block_tables: Tensor  # [rows, width] int32; entries past a row's context, or before its window, are never read
    sample_at: Tensor  # [samples] int64, flat indices of the tokens whose logits are computed
    max_query_len: int  # longest row of this step, in tokens
    max_context_len: int
    groups: tuple[GroupTables, ...] = ()  # of cache groups 1 and up (`model/layer_groups.py`); kernels see one group
    group_of_layer: tuple[int, ...] = ()  # () where there is one group
    on_trial: Tensor | None = None  # [rows] int32, not 0 where recurrent states stay what they are; None: nowhere


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The sizes and options of a layer's attention.

    Kernels implement every option, or name those that they do not in `refusal`.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int = 0  # tokens a query may look back on, itself included; 0: no limit
    soft_cap: float = 0.0  # scores become soft_cap * tanh(score / soft_cap) (Gemma 2); 0: none


LayerShape = AttentionShape | DeltaShape
"""What a layer keeps of every token, or of the last one."""


class SharedNorm(NamedTuple):
    """What a norm of all heads needs where ranks share them."""

    add_up: Callable[[Tensor], Tensor]  # squares of this rank's queries and keys, `[tokens, 2]` float32, to all ranks'
    numbers: tuple[int, int]  # of queries and of keys, that all ranks square


@dataclass(frozen=True, slots=True)
class QKNorm:
    """RMS norms of queries and keys before the rotary embedding.

    Of each head by itself, with weights `[head_dim]` (Qwen3), or of all heads together, with `[heads * head_dim]`
    (OLMo 2).
    """

    query: Tensor
    key: Tensor
    eps: float
    offset: float = 0.0  # added to both weights
    shared: SharedNorm | None = None  # None: these are all heads, or each is normed by itself


class Graph(Protocol):
    """Captured work that can run again on the current contents of the same memory."""

    @property
    def result(self) -> Tensor:
        """The result; it is valid until any graph runs."""
        ...

    def run(self) -> Tensor:
        """Run it again, and return its result."""
        ...


class DeltaKernels(Protocol):
    """What layers with a recurrent state (`delta.py`) need of kernels."""

    delta_refusal: str  # why `gated_delta` does not work, in one sentence; "" where it does

    def gated_delta(
        self, mixed: Tensor, gates: Tensor, weights: DeltaWeights, cache: LayerCache, batch: RaggedBatch,
        shape: DeltaShape,
    ) -> Tensor:
        """All between a layer's products, of every row: `[tokens, value heads * value_dim]`.

        `mixed [tokens, channels + value heads * value_dim]` are queries, keys and values, then z; `gates [tokens, 2 *
        value heads]` are b, then a.  A row whose first position is 0 begins with a state of zeros, any other with that
        in the block of the position before; whatever else the cache holds does not matter.  Every row writes the states
        of its blocks, but those `batch.on_trial`.  A row's result is the same bit for bit however its tokens are
        divided among steps.

        Raises:
            ValueError: these kernels have no such layers: `delta_refusal`.
        """
        ...

    def sigmoid_mul(self, gate: Tensor, x: Tensor) -> Tensor:
        """`sigmoid(gate) * x`, both `[tokens, size]`."""
        ...


class Kernels(DeltaKernels, Protocol):
    """All operations of a decoder layer.  Implementations hold no request state."""

    name: str
    device: device  # where all tensors live
    kinds: tuple[dtype, ...]  # of weights that are supported
    records_drafts: bool  # a graph reads from memory how many tokens each row has
    mixture_refusal: str  # why `experts` does not work, in one sentence; "" where it does
    adapter_refusal: str  # likewise of `adapters`

    def warm_up(self, kind: dtype) -> None:
        """Compile or load everything for weights of one type before the first request needs it.

        Formats of quantised matrices are known once they are packed: a call after that prepares for them, too.
        """
        ...

    def product_path(self, kind: dtype) -> str:
        """The name of the path that multiplies with weights of `kind`, for people and bug reports.

        With most of the weights, where some are packed as quantised matrices and others not.
        """
        ...

    def batch_dependence(self, kind: dtype) -> str:
        """Why a position's result may depend on what else a step computes, in one sentence; "" where it never does.

        Of a model that computes in `kind`.
        """
        ...

    def operations_per_second(self, kind: dtype) -> float:
        """Roughly, in large products.  Determines the size of a step where no option does."""
        ...

    def refusal(self, shape: AttentionShape) -> str:
        """The option of `shape` that these kernels do not support, in one sentence; "" where they support all."""
        ...

    def allocate_cache(self, num_blocks: int, block_size: int, shape: LayerShape, kind: dtype) -> LayerCache:
        """One layer's zeroed cache of `num_blocks` blocks of `block_size` tokens, for a model that computes in `kind`.

        The type of its elements is fixed when the kernels are constructed.  A block of keys and values may hold a state
        instead that takes no more bytes.
        """
        ...

    def cache_bytes_per_block(self, block_size: int, shape: LayerShape, kind: dtype) -> int:
        """Bytes of one block in one layer: keys, values and their scales, if any, or a state."""
        ...

    def cache_pieces(self, cache: LayerCache) -> tuple[Tensor, ...]:
        """All of a layer's cache, as contiguous views `[blocks, ...]`: what is copied when blocks are offloaded."""
        ...

    def format_refusal(self, format: Format, kind: dtype) -> str:
        """Why a model of `kind` cannot have matrices of a quantised format, in one sentence; "" where it can."""
        ...

    def linear(self, weight: Weight, bias: Tensor | None = None) -> Linear:
        """Pack `weight [out, in]` once, for many products.

        Numbers go in and come out in the type of a weight that is a tensor, or for a quantised matrix in any of `kinds`
        (rows of one product in the same one).  What is quantised is read from its file here, and stays quantised.
        """
        ...

    def gated(self, weight: Weight, bias: Tensor | None = None, activation: Activation = "silu") -> Linear:
        """Pack `weight [2 * intermediate, in]`, gates first, once for many `activation(gate) * up`.

        The product gives `[tokens, intermediate]`.  It takes as many bytes as a `linear`.
        """
        ...

    def exact_linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """A `linear` that is never quantised, in as many bytes as `weight`."""
        ...

    def head(self, weight: Weight) -> Linear:
        """Pack `weight [vocab, hidden]` for logits."""
        ...

    def experts(
        self, weights: Iterable[ExpertWeights], routing: Routing, activation: Activation | ClampedSwiGLU, ends: Tensor,
    ) -> Mixture:
        """Pack a layer's experts, one after another.  Steps read the weights of experts that tokens choose, only.

        Each takes as many bytes as two `linear`s.  A step puts its tokens in the order of their experts, and adds where
        those of each expert end to `ends [experts]` int64, on the device: its differences count tokens by expert.

        Raises:
            ValueError: these kernels have no mixtures: `mixture_refusal`.
        """
        ...

    def adapters(self, num_places: int, max_rank: int, kind: dtype) -> AdapterProducts:
        """What up to `num_places` adapters of up to `max_rank` add to the products of a model that computes in `kind`.

        Raises:
            ValueError: these kernels have no such products: `adapter_refusal`.
        """
        ...

    def embedding(self, table: QuantisedMatrix, kind: dtype, scale: float = 1.0) -> Callable[[Tensor], Tensor]:
        """Pack `table [vocabulary, hidden]` for `embed`: from token ids `[tokens]` int64 to `[tokens, hidden]`.

        Rows are dequantised, multiplied by `scale` and rounded to `kind`.  A `head` of the same matrix shares memory.
        """
        ...

    def linear_bytes(self, weight: Weight) -> int:
        """Bytes of a packed `linear`.  Only shape and type of the weight are read."""
        ...

    def head_bytes(self, weight: Weight) -> int:
        """Bytes of a packed `head`."""
        ...

    def library_bytes(self, kind: dtype) -> int:
        """The most bytes of host memory a library keeps for products with weights of `kind`, beside the weights."""
        ...

    def graph_size(self, tokens: int, context: int) -> tuple[int, int]:
        """Tokens, of each row one and its drafts, and tokens of context of the graph that serves a step of this size.

        No tokens where running a graph gains nothing.  Never fewer for more tokens, nor for more context.
        """
        ...

    def record(self, work: Callable[[], Tensor]) -> Graph | None:
        """Run `work`, which calls these kernels and nothing else, and capture it as a graph.

        Returns None without running `work` where that is not possible.
        """
        ...

    def embed(self, table: Tensor, token_ids: Tensor, first: int | None = None) -> Tensor:
        """Rows of `table [vocabulary, hidden]` by `token_ids [tokens]` int64: `[tokens, hidden]`.

        With `first` the table is a part of one: it begins with the row of that id, and ids outside give zeros.
        """
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        """RMSNorm over the last dimension of `x [tokens, hidden]`; `offset` is added to the weight in float32."""
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        """`residual += x` in place, then RMSNorm of the sum: `[tokens, hidden]`."""
        ...

    def add(self, x: Tensor, residual: Tensor, gate: Tensor | None = None) -> Tensor:
        """`residual += x` in place, or `residual += sigmoid(gate) * x` with `gate [tokens, 1]`; returns `residual`."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """`silu(gate) * up` for `gate_up [tokens, 2 * intermediate]`."""
        ...

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        """`gelu(gate) * up`, with GELU's approximation by tanh."""
        ...

    def clamped_swiglu(self, gate_up: Tensor, activation: ClampedSwiGLU) -> Tensor:
        """Its activation of `gate_up [tokens, 2 * intermediate]`."""
        ...

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        """`cap * tanh(x / cap)`.  NaN and infinities stay what they are."""
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

    def attention(
        self, query: Tensor, cache: LayerCache, batch: RaggedBatch, shape: AttentionShape, sinks: Tensor | None = None,
    ) -> Tensor:
        """Causal attention of every row over its own cached context: `[tokens, heads * head_dim]`.

        `sinks [heads]` float32 are scores without a value: each takes part in the softmax of its head's queries
        (GPT-OSS), after the soft cap and whatever the window.
        """
        ...


def in_two_steps(kernels: Kernels, weight: Weight, bias: Tensor | None, activation: Activation = "silu") -> Linear:
    """`gated` for kernels without a fused one: the product, then the activation."""
    product, multiply = kernels.linear(weight, bias), activated(kernels, activation)
    return lambda x: multiply(product(x))


def activated(kernels: Kernels, activation: Activation | ClampedSwiGLU) -> Linear:
    """`[tokens, 2 * intermediate] -> [tokens, intermediate]`: gates, and what they gate."""
    if isinstance(activation, ClampedSwiGLU):
        return lambda gate_up: kernels.clamped_swiglu(gate_up, activation)
    return {"silu": kernels.silu_mul, "gelu_tanh": kernels.gelu_mul}[activation]
