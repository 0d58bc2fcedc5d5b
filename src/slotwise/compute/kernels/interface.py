"""The contract between a model and the kernels that compute it: shapes, batches, caches, adapters and all operations.

There is one implementation per device: `reference.py`, `cpu/kernels.py` and `cuda/kernels.py`.

A step arrives as a *ragged batch*: the tokens of every row laid end to end, nothing padded.  Linear layers, norms and
activations run over all tokens at once; attention runs per row over the row's block table.  That is Orca's selective
batching (Yu et al., OSDI 2022) over vLLM's paged memory (Kwon et al., SOSP 2023).

    rows          A (decode)   B (chunk of 3)   C (decode)
    tokens        [ a ]        [ b0 b1 b2 ]     [ c ]
    query_starts   0            1                4            5
    context_lens   7            3                12           (tokens in the cache once this step's are written)
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, get_args

from torch import Tensor, device, dtype, float8_e4m3fn, float32, int8

from slotwise.compute.kernels.matrix import Format, QuantizedMatrix, Weight

Linear = Callable[[Tensor], Tensor]
"""A packed product: `[tokens, in] -> [tokens, out]`, bias included."""

Activation = Literal["silu", "gelu_tanh", "gelu", "quick_gelu", "relu", "relu2"]
"""SiLU (Elfwing et al., 2017); GELU (Hendrycks and Gimpel, 2016) with its approximations by tanh and by a sigmoid of
1.702 times the input; ReLU, and its square (So et al., "Primer", 2021)."""

ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)


class LayerNormWeights(NamedTuple):
    """A LayerNorm (Ba et al., 2016): `(x - mean) / sqrt(variance + eps) * (weight + offset) + bias`."""

    weight: Tensor | None  # [size]; None: ones
    bias: Tensor | None  # [size]; None: zeros
    eps: float
    offset: float = 0.0  # added to the weight in float32


class PlainActivation(NamedTuple):
    """That of experts without gates, whose first product has half as many outputs."""

    name: Activation


@dataclass(frozen=True, slots=True)
class ClampedSwiGLU:
    """The activation of gpt-oss: `(clamp(up) + 1) * g * sigmoid(alpha * g)`, with `g = min(gate, limit)`.

    `up` is clamped to `-limit ... limit`.
    """

    alpha: float
    limit: float


ExpertActivation = Activation | PlainActivation | ClampedSwiGLU
"""What is between an expert's products."""

Scoring = Literal["softmax", "sigmoid", "sparse_mixer"]
"""How logits of a router become scores of experts; the last is that of Phi-3.5-MoE (Liu et al., "GRIN", 2024)."""


class ExpertGroups(NamedTuple):
    """Groups of equal size, of which a token's experts come from a few (DeepSeek-AI, "DeepSeek-V2", 2024).

    Those groups have the largest sums of their `num_best` largest values: 1 in DeepSeek-V2, 2 in DeepSeek-V3.
    """

    number: int
    kept: int
    num_best: int


@dataclass(frozen=True, slots=True)
class Routing:
    """How a token's experts are chosen: the `top_k` of `num_experts` with the largest values, the first of equal ones.

        value = logit;  with a correction, or with groups by two values: score + correction, or logit + correction
        share = scale * score;  normalized: scale * score / max(sum of the scores of the chosen, least_sum)

    Scores are the softmax of all logits, or the sigmoid of each.  As "sparse_mixer", the score of each chosen expert is
    its softmax over the experts that are neither chosen before it nor less by more than `2 * jitter`, relatively.

    Args:
        scales_inputs: the inputs of experts are multiplied by shares, and not their results (Llama 4).
        held: the experts whose weights this rank holds; results leave out the others.  None: all.
        corrects_logits: corrections are added to logits, and not to scores.
        correction: added where experts are chosen, `[experts]` float32 (Wang et al., "Auxiliary-loss-free
            load balancing", 2024).
    """

    num_experts: int
    top_k: int
    is_normalized: bool
    scoring: Scoring = "softmax"
    scale: float = 1.0
    least_sum: float = 0.0
    groups: ExpertGroups | None = None
    jitter: float = 0.0
    scales_inputs: bool = False
    corrects_logits: bool = False
    held: range | None = None
    correction: Tensor | None = field(default=None, compare=False)

    @property
    def experts(self) -> range:
        """The experts whose weights are here."""
        return range(self.num_experts) if self.held is None else self.held

    @property
    def chooses_by_scores(self) -> bool:
        """Whether experts are chosen by scores, whose order is not that of logits once numbers are added."""
        is_corrected = self.correction is not None and not self.corrects_logits
        return is_corrected or (self.groups is not None and self.groups.num_best > 1)


class ExpertWeights(NamedTuple):
    """Weights of one expert; all experts of a layer are stored in the same formats."""

    gate_up: Weight  # [2 * intermediate, hidden], gates first; without gates [intermediate, hidden]
    down: Weight  # [hidden, intermediate]
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None


Mixture = Callable[[Tensor, Tensor], Tensor]
"""Packed experts: `x [tokens, hidden], logits [tokens, experts] -> [tokens, hidden]`."""


CACHE_KINDS: dict[str, dtype | None] = {"auto": None, "int8": int8, "fp8": float8_e4m3fn}
"""The types of a cache, by the names of options; None: the type that the model computes in.

int8 has a scale for each token and head.  fp8 has none; values beyond FP8_LARGEST are stored as FP8_LARGEST.
"""

FP8_LARGEST = 448.0
"""The largest number with four bits of exponent and three of fraction (Micikevicius et al., 2022)."""


def cache_kind(name: str, device: str, kept: Sequence[str]) -> dtype | None:
    """The type of `CACHE_KINDS` for `name`, which must be in `kept`, the names a device supports.

    Raises:
        ValueError: it is not in `kept`.
    """
    if name not in kept:
        raise ValueError(f"kv_cache_dtype must be {' or '.join(kept)} on device {device}, not {name!r}")
    return CACHE_KINDS[name]


LayerCache = Any
"""One layer's keys and values, or its states; its layout belongs to the kernels that made it."""


class GroupTables(NamedTuple):
    """The columns of a batch that each cache group has for itself."""

    slot_mapping: Tensor
    block_tables: Tensor


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """One step, flat.  All tensors live on the kernels' device.

    A row's new tokens stand at positions `context_len - query_len ... context_len - 1`; token t's key and value are
    written to cache place `slot_mapping[t] = block * block_size + offset` before the row attends.

    `groups` are the tables of cache groups 1 and up (`compute/model/layer_groups.py`), and `group_of_layer` names each
    layer's group, `()` where there is one; kernels see one group.
    """

    token_ids: Tensor  # [tokens] int64
    positions: Tensor  # [tokens] int64, position of each token in its own sequence
    slot_mapping: Tensor  # [tokens] int64
    query_starts: Tensor  # [rows + 1] int32, the first token of each row
    context_lens: Tensor  # [rows] int32
    # [rows, width] int32; entries past a row's context, or before its window, are never read.
    block_tables: Tensor
    # [samples] int64, the flat indices of the tokens whose logits are computed.
    sample_at: Tensor
    # The most new tokens of a row, and the longest context.
    max_query_len: int
    max_context_len: int
    groups: tuple[GroupTables, ...] = ()
    group_of_layer: tuple[int, ...] = ()
    # [rows] int32, not 0 for rows whose recurrent states must not change; None: there are no such rows.
    on_trial: Tensor | None = None


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The sizes and options of a layer's attention.

    Kernels implement every option, or name the ones that they do not in `refusal`.

    Args:
        window: tokens that a query sees, itself included; 0: no limit.  Without causality as many on either side.
        soft_cap: scores become `soft_cap * tanh(score / soft_cap)` (Gemma 2); 0: scores are not capped.
        has_biases: scores have biases by head and position of the key (ALiBi).
        has_relative_biases: they are by head, and by the position of the key less that of the query (MPNet).
        is_chunked: the window is that of a chunk of positions, which begins at a multiple of its size (Llama 4).
        is_causal: a query sees no token after itself.  Else it sees those of its row's context, too (BERT).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int = 0
    soft_cap: float = 0.0
    is_causal: bool = True
    has_biases: bool = False
    is_chunked: bool = False
    has_relative_biases: bool = False

    @property
    def span(self) -> int:
        """The window as kernels take it: negative if it is a chunk."""
        return -self.window if self.is_chunked else self.window

    @property
    def ahead(self) -> int:
        """Tokens after itself that a query sees, of those in its row's context."""
        if self.is_causal:
            return 0
        return self.window - 1 if self.window else NO_END


NO_END = 1 << 30
"""More tokens than a context has."""

LENGTH_EPS = 1e-6
"""Added to the squares of queries and keys before they are scaled to length 1."""


class StateShape:
    """The sizes of a layer with a recurrent state: what all such layers have.

    Their inputs pass a short causal convolution over the last `taps` tokens of each of `channels` channels:

        out[t] = weights[0] * in[t - taps + 1] + ... + weights[taps - 1] * in[t] + bias

    A row's past is one state: that of the layer's rule, and the last inputs of the convolution.  It lies in the cache
    where other layers have keys and values: the block that holds token t in a row's block table holds the state after
    the last token written to that block so far.  A full block is therefore a snapshot at its end; a step reads the
    block of the token before its first one, and writes the blocks of its own tokens.

        tokens    0 .. 15 | 16 .. 31 | 32 .. 40       block_size 16
        state       [5]       [2]        [9]          after tokens 15, 31 and 40; the next step reads block 9 alone
    """

    # In tokens: a step reads the state after the token before its first one, and nothing older.
    window: ClassVar[int] = 1
    taps: int

    @property
    def channels(self) -> int:
        """Channels of the convolution."""
        raise NotImplementedError

    @property
    def rule_floats(self) -> int:
        """Numbers of the rule's state."""
        raise NotImplementedError

    @property
    def width(self) -> int:
        """The most numbers per token that the layer's activations take at a time."""
        raise NotImplementedError

    def num_weights(self, hidden_size: int) -> int:
        """Weights of the layer's products."""
        raise NotImplementedError

    @property
    def state_bytes(self) -> int:
        """Bytes of a state, in float32: the rule's, then the inputs `[taps - 1, channels]`, the oldest first."""
        return float32.itemsize * (self.rule_floats + (self.taps - 1) * self.channels)


@dataclass(frozen=True, slots=True)
class ConvolutionShape(StateShape):
    """A layer that is a short convolution between two gates, without a further rule (LFM2, Liquid AI, 2025).

        b, c, x ─► b * x ─► convolution ─► times c
    """

    size: int
    taps: int

    @property
    def channels(self) -> int:
        return self.size

    @property
    def rule_floats(self) -> int:
        return 0

    @property
    def width(self) -> int:
        return 4 * self.size

    def num_weights(self, hidden_size: int) -> int:
        return 4 * self.size * hidden_size


class ConvolutionWeights(NamedTuple):
    """The weights of a short convolution, in float32."""

    taps: Tensor  # [taps, channels], the oldest token first
    bias: Tensor | None = None  # [channels]


@dataclass(frozen=True, slots=True)
class StateSpaceShape(StateShape):
    """The sizes of Mamba-2's layer: a decay per head and step (Dao and Gu, "Transformers are SSMs", 2024).

        z │ x, B, C │ dt ─► convolution of x, B, C, SiLU ─► the rule ─► norm and gate by silu(z)

        state = exp(rate * dt) * state;  state += outer(B, dt * x);  out = C @ state + skip * x

    for each head, with `dt = clamp(softplus(dt + step_bias))`; the heads of a group share B and C.

    Args:
        norm_groups: of the RMS norm over all values, each normed by itself; 0: results are gated and not normed.
        is_normed_first: the norm is before the gate.
        least_step, largest_step: bounds of dt.
    """

    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    taps: int
    norm_groups: int = 1
    is_normed_first: bool = False
    least_step: float = 0.0
    largest_step: float = math.inf

    @property
    def values(self) -> int:
        """Numbers of all heads."""
        return self.num_heads * self.head_dim

    @property
    def channels(self) -> int:
        return self.values + 2 * self.num_groups * self.state_size

    @property
    def rule_floats(self) -> int:
        """Numbers of the rule's state, `[heads, head_dim, state_size]`."""
        return self.values * self.state_size

    @property
    def width(self) -> int:
        return 3 * self.channels + 4 * self.values + self.num_heads  # what is convolved, and results, are float32

    def num_weights(self, hidden_size: int) -> int:
        return (self.channels + 2 * self.values + self.num_heads) * hidden_size


class StateSpaceWeights(NamedTuple):
    """The weights of such a layer outside its products, in float32."""

    convolution: ConvolutionWeights
    rate: Tensor  # [heads], below 0
    step_bias: Tensor  # [heads]
    skip: Tensor  # [heads]
    norm: Tensor | None  # [values]
    eps: float


@dataclass(frozen=True, slots=True)
class SelectiveShape(StateShape):
    """The sizes of Mamba's layer: a decay for every channel and number of the state (Gu and Dao, "Mamba", 2023).

        x, z ─► convolution of x, SiLU ─► dt, B, C, products of x ─► the rule ─► times silu(z)

        state = exp(rate * dt) * state + outer(B, dt * x);  out = C @ state + skip * x

    for each channel, with `dt = softplus(dt)`; the channels of a group share B and C.
    """

    size: int
    state_size: int
    taps: int
    step_rank: int  # inputs of the product that makes dt
    num_groups: int = 1

    @property
    def channels(self) -> int:
        return self.size

    @property
    def rule_floats(self) -> int:
        """Numbers of the rule's state, `[state_size, channels]`."""
        return self.size * self.state_size

    @property
    def width(self) -> int:
        return 6 * self.size + 2 * self.num_groups * (self.step_rank + 2 * self.state_size)

    def num_weights(self, hidden_size: int) -> int:
        return self.size * (3 * hidden_size + 2 * self.step_rank + 2 * self.state_size)


class SelectiveWeights(NamedTuple):
    """The weights of such a layer's rule outside its products, in float32."""

    rate: Tensor  # [state_size, channels], below 0
    skip: Tensor  # [channels]


class SelectiveInputs(NamedTuple):
    """What the rule of a `SelectiveShape` reads for each token; rows may be parts of longer ones."""

    x: Tensor  # [tokens, channels], convolved
    steps: Tensor  # [tokens, channels], dt before softplus
    b: Tensor  # [tokens, groups * state_size]
    c: Tensor
    gate: Tensor  # [tokens, channels], z


@dataclass(frozen=True, slots=True)
class DeltaShape(StateShape):
    """The sizes of the gated delta rule (Yang et al., "Gated Delta Networks: Improving Mamba2 with Delta Rule", 2024).

        q, k, v ─► convolution, SiLU ─► q and k of length 1 ─► the rule ─► norm, times silu(z)

        state = decay * state;  state += outer(k, beta * (v - k @ state));  out = q @ state / sqrt(key_dim)

    for each value head, with `beta = scale * sigmoid(b)` and `decay = exp(rate * softplus(a + step_bias))`.  A state
    has one decay, or one for each of its `key_dim` lines (Kimi Team, "Kimi Linear", 2025).  A `scale` of 2 lets states
    change their sign (Grazzi et al., "Unlocking state-tracking in linear RNNs through negative eigenvalues", 2024).
    """

    # Every key head serves the same number of adjacent value heads.
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    decays_lines: bool = False  # each line of a state has a decay of its own
    beta_scale: float = 1.0
    is_gated_by_sigmoid: bool = False  # results are multiplied by `sigmoid(z)` in place of `silu(z)`

    @property
    def channels(self) -> int:
        """Queries, keys and values of all heads."""
        return 2 * self.num_key_heads * self.key_dim + self.values

    @property
    def values(self) -> int:
        """Numbers of all value heads."""
        return self.num_value_heads * self.value_dim

    @property
    def rule_floats(self) -> int:
        """Numbers of the rule's state, `[value heads, key_dim, value_dim]`."""
        return self.values * self.key_dim

    @property
    def num_decays(self) -> int:
        """Decays of all value heads."""
        return self.num_value_heads * (self.key_dim if self.decays_lines else 1)

    @property
    def width(self) -> int:
        # What is convolved is float32.
        return 3 * self.channels + 2 * self.values + self.num_value_heads + self.num_decays

    def num_weights(self, hidden_size: int) -> int:
        return (self.channels + 2 * self.values + self.num_value_heads + self.num_decays) * hidden_size


class DeltaWeights(NamedTuple):
    """The weights of such a layer outside its products, in float32."""

    convolution: Tensor  # [taps, channels], the oldest token first
    rate: Tensor  # [value heads], below 0
    step_bias: Tensor  # [decays]
    norm: Tensor  # [value_dim]
    eps: float


@dataclass(frozen=True, slots=True)
class LatentShape:
    """The sizes of a layer's compressed attention (multi-head latent attention; DeepSeek-AI, "DeepSeek-V2", 2024).

    Keys and values of all heads are products of one vector per token, the latent, and all heads share one rotary key.
    The cache holds just these two, `rank + rope_dim` numbers per token:

        cached     [ latent | rotary key ]
        query h    [ q_nope | q_rope ]
        score h    (q_nope @ key_up[h]) . latent  +  q_rope . rotary key
        result h   (weights @ latents) @ value_up[h].T

    So heads are queries of one key, whose first `rank` numbers are the value, and no key or value of a head is made.

    Args:
        has_neighbors: rotary pairs are dimensions 2i and 2i + 1, instead of i and i + rope_dim / 2.
    """

    # Every query sees all tokens before it.
    window: ClassVar[int] = 0
    num_heads: int
    rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    scale: float
    has_neighbors: bool

    @property
    def query_dim(self) -> int:
        """Numbers of a query of one head, before `key_up` is absorbed."""
        return self.nope_dim + self.rope_dim

    @property
    def width(self) -> int:
        """Numbers of a token in the cache."""
        return self.rank + self.rope_dim


class LatentNorm(NamedTuple):
    """The RMS norm of latents before they are stored."""

    weight: Tensor  # [rank] float32
    eps: float


PackedLatentProducts = Any
"""The products around the attention of a `LatentShape`, as its kernels pack them."""


LayerShape = AttentionShape | StateShape | LatentShape
"""What a layer keeps in its cache: something of every token, or the state after the last one."""


class SharedNorm(NamedTuple):
    """What a norm over all heads needs where ranks share them.

    `add_up` turns the sums of squares of this rank's queries and keys, `[tokens, 2]` float32, into those of all ranks;
    `numbers` are how many numbers of queries and of keys all ranks square.
    """

    add_up: Callable[[Tensor], Tensor]
    numbers: tuple[int, int]


@dataclass(frozen=True, slots=True)
class QKNorm:
    """RMS norms of queries and keys before the rotary embedding.

    They are taken over each head by itself, with weights `[head_dim]` (Qwen3), or over all heads together, with weights
    `[heads * head_dim]` (OLMo 2).  `offset` is added to both weights; `shared` is None unless ranks share the heads of
    one norm.
    """

    query: Tensor
    key: Tensor
    eps: float
    offset: float = 0.0
    shared: SharedNorm | None = None


NO_ADAPTER = -1
"""The place of a row that is computed with the base model."""


class LowRankPart(NamedTuple):
    """What an adapter adds to some outputs of a product: `x @ a.T @ b.T`; nothing where the rank is 0."""

    # The first of these outputs.
    first: int
    a: Tensor  # [rank, inputs]
    b: Tensor  # [outputs, rank], scaled


class LowRank(NamedTuple):
    """What an adapter adds to a product: parts for different outputs, and a bias for the outputs of its parts."""

    parts: tuple[LowRankPart, ...]
    bias: Tensor | None = None  # [outputs of the product], 0 where there is no part


PackedFactors = Any
"""An adapter's factors of one product, as its kernels pack them."""


class AddedProduct(Protocol):
    """What adapters add to one product."""

    def pack(self, factors: LowRank) -> PackedFactors:
        """Returns an adapter's factors for `set`; changes nothing, so that a step may run meanwhile."""
        ...

    def set(self, place: int, packed: PackedFactors | None) -> None:
        """Put packed factors at a place, or remove them with None.  No row of a running step may have this place."""
        ...

    def add(self, x: Tensor, out: Tensor) -> Tensor:
        """Add to `out [rows, outputs]`, in place, what the adapter of each row of `x [rows, inputs]` adds to it.

        Sums are float32, rounded once.  A row's result does not depend on the other rows.  Returns `out`.
        """
        ...


class AdapterProducts(Protocol):
    """The adapters of rows, and the low-rank terms that they add to the products of one model (LoRA, Hu et al., 2021).

        out[i] += x[i] @ a[place[i]].T @ b[place[i]].T + bias[place[i]]    place[i]: of row i's adapter, or NO_ADAPTER

    One product of a model may be several weights of its checkpoint, stacked along their outputs; an adapter has factors
    of its own for some or all of them.  Graphs read the places of rows from memory.
    """

    @property
    def are_any(self) -> bool:
        """Whether a row has an adapter."""
        ...

    def assign(self, places: Sequence[int]) -> None:
        """Set the place of the adapter of each row of the products that follow, NO_ADAPTER for the base model."""
        ...

    def select(self, rows: Tensor) -> None:
        """Keep these rows, `[rows]` int64, of those that were assigned."""
        ...

    def product(self, outputs: int, inputs: int, num_parts: int) -> AddedProduct:
        """What adapters add to a product, in at most `num_parts` parts; nothing before a part is set."""
        ...


class Graph(Protocol):
    """Captured work that can run again on the current contents of the same memory."""

    @property
    def result(self) -> Tensor:
        """The result; it is valid until any graph runs."""
        ...

    def run(self) -> Tensor:
        """Run it again, and return its result."""
        ...


class StateKernels(Protocol):
    """What layers with a recurrent state (`StateShape`) need of kernels.

    A row whose first position is 0 begins with a state of zeros, any other row with the state in the block of the
    position before; the rest of the cache does not matter.  Every row writes the states of its blocks, except rows that
    are `batch.on_trial`.  A row's result is the same bit for bit however its tokens are divided among steps.

    `state_refusal` says in one sentence why these operations raise ValueError; "" where they work.
    """

    state_refusal: str

    def gated_convolution(
        self, bcx: Tensor, weights: ConvolutionWeights, cache: LayerCache, batch: RaggedBatch, shape: ConvolutionShape,
    ) -> Tensor:
        """`c * convolution(b * x)` for `bcx [tokens, 3 * channels]`: `[tokens, channels]`."""
        ...

    def silu_convolution(
        self, x: Tensor, weights: ConvolutionWeights, cache: LayerCache, batch: RaggedBatch, shape: SelectiveShape,
    ) -> Tensor:
        """`silu(convolution(x))` for `x [tokens, channels]`, rows of which may be parts of longer ones."""
        ...

    def selective_scan(
        self, inputs: SelectiveInputs, weights: SelectiveWeights, cache: LayerCache, batch: RaggedBatch,
        shape: SelectiveShape,
    ) -> Tensor:
        """The rule of a `SelectiveShape`, gated, behind `silu_convolution`: `[tokens, channels]`."""
        ...

    def state_space(
        self, mixed: Tensor, weights: StateSpaceWeights, cache: LayerCache, batch: RaggedBatch, shape: StateSpaceShape,
    ) -> Tensor:
        """Everything between a layer's products, for every row: `[tokens, values]`.

        `mixed [tokens, values + channels + heads]` are z, then x, B and C, then dt.
        """
        ...

    def gated_delta(
        self, mixed: Tensor, gates: Tensor, weights: DeltaWeights, cache: LayerCache, batch: RaggedBatch,
        shape: DeltaShape,
    ) -> Tensor:
        """Everything between a layer's products, for every row: `[tokens, value heads * value_dim]`.

        `mixed [tokens, channels + value heads * value_dim]` are queries, keys and values, then z; `gates [tokens, value
        heads + decays]` are b, then a.
        """
        ...

    def sigmoid_mul(self, gate: Tensor, x: Tensor) -> Tensor:
        """`sigmoid(gate) * x`, both `[tokens, size]`."""
        ...


class LatentKernels(Protocol):
    """What compressed attention (`LatentShape`) needs of kernels; `Kernels.refusal` says where it does not work."""

    def latent_products(self, key_up: Tensor, value_up: Tensor) -> PackedLatentProducts:
        """Pack `key_up [heads, nope_dim, rank]` and `value_up [heads, value_dim, rank]`, once for many steps."""
        ...

    def latent_store(
        self, query: Tensor, compressed: Tensor, rotary: Tensor, batch: RaggedBatch, cache: LayerCache,
        shape: LatentShape, norm: LatentNorm,
    ) -> Tensor:
        """Norm the latents and rotate the keys of `compressed [tokens, width]`, and write both to the cache.

        The rotary part of each head of `query [tokens, heads * query_dim]` is rotated in place; returns `query`.
        """
        ...

    def latent_attention(
        self, query: Tensor, cache: LayerCache, batch: RaggedBatch, shape: LatentShape, products: PackedLatentProducts,
    ) -> Tensor:
        """Causal attention of every row over its own cached context: `[tokens, heads * value_dim]`.

        `query [tokens, heads * query_dim]` is what `latent_store` returned.  A row's result is the same bit for bit
        however its tokens are divided among steps.
        """
        ...


class Kernels(StateKernels, LatentKernels, Protocol):
    """All operations of a decoder layer.  Implementations hold no request state.

    Attributes:
        device: where all tensors live.
        kinds: the types of weights that are supported.
        records_drafts: whether a graph reads from memory how many tokens each row has.
        mixture_refusal: why `experts` does not work, in one sentence; "" where it does.
        adapter_refusal: why `adapters` does not work, in one sentence; "" where it does.
    """

    name: str
    device: device
    kinds: tuple[dtype, ...]
    records_drafts: bool
    mixture_refusal: str
    adapter_refusal: str

    def warm_up(self, kind: dtype) -> None:
        """Compile or load everything for weights of one type before the first request needs it.

        Formats of quantized matrices are known once they are packed: a later call prepares for them, too.
        """
        ...

    def product_path(self, kind: dtype) -> str:
        """The name of the path that multiplies with weights of `kind`, for people and bug reports.

        Where some weights are packed as quantized matrices and others are not, the path of most weights.
        """
        ...

    def batch_dependence(self, kind: dtype) -> str:
        """Why a position's result in a model of `kind` may depend on what else a step computes; "" if it never does."""
        ...

    def operations_per_second(self, kind: dtype) -> float:
        """The approximate rate of large products.  Determines the size of a step unless an option does."""
        ...

    def refusal(self, shape: AttentionShape | LatentShape) -> str:
        """The option of `shape` that these kernels do not support, in one sentence; "" where they support all."""
        ...

    def allocate_cache(self, num_blocks: int, block_size: int, shape: LayerShape, kind: dtype) -> LayerCache:
        """One layer's zeroed cache of `num_blocks` blocks of `block_size` tokens, for a model that computes in `kind`.

        The type of its elements is fixed when the kernels are constructed.  A block may hold keys and values, or
        instead of them a state that takes no more bytes.
        """
        ...

    def cache_bytes_per_block(self, block_size: int, shape: LayerShape, kind: dtype) -> int:
        """Bytes of one block in one layer: keys, values and any scales, or a state."""
        ...

    def cache_pieces(self, cache: LayerCache) -> tuple[Tensor, ...]:
        """A layer's whole cache, as contiguous views `[blocks, ...]`: what is copied when blocks are offloaded."""
        ...

    def format_refusal(self, format: Format, kind: dtype) -> str:
        """Why a model of `kind` cannot have matrices of a quantized format, in one sentence; "" where it can."""
        ...

    def linear(self, weight: Weight, bias: Tensor | None = None, activation: Activation | None = None) -> Linear:
        """Pack `weight [out, in]` once, for many products; with an activation, for many `activation(product)`.

        If the weight is a tensor, inputs and results have its type; with a quantized matrix they have any of `kinds`,
        the same for all rows of a product.  Quantized weights are read from their file here, and stay quantized.
        """
        ...

    def gated(self, weight: Weight, bias: Tensor | None = None, activation: Activation = "silu") -> Linear:
        """Pack `weight [2 * intermediate, in]`, gates first, once for many `activation(gate) * up`.

        The product returns `[tokens, intermediate]`.  It takes as many bytes as a `linear`.
        """
        ...

    def exact_linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """A `linear` that is never quantized, and takes as many bytes as `weight`."""
        ...

    def head(self, weight: Weight, bias: Tensor | None = None) -> Linear:
        """Pack `weight [vocab, hidden]` for logits of the type `wide_kind`."""
        ...

    def wide_kind(self, kind: dtype) -> dtype:
        """The type of logits, and of the residual stream, in a model that computes in `kind`."""
        ...

    def convert(self, x: Tensor, kind: dtype) -> Tensor:
        """`x [tokens, size]` as another type, rounded to nearest; `x` itself where it has that type."""
        ...

    def experts(
        self, weights: Iterable[ExpertWeights], routing: Routing, activation: ExpertActivation, ends: Tensor,
    ) -> Mixture:
        """Pack a layer's experts, one after another.  Steps read the weights only of experts that tokens choose.

        Each expert takes as many bytes as two `linear`s.  A step sorts its tokens by expert, and adds the end of each
        expert's tokens to `ends [experts]` int64, on the device: the differences of `ends` count tokens by expert.

        Raises:
            ValueError: these kernels have no mixtures: `mixture_refusal`.
        """
        ...

    def adapters(self, num_places: int, max_rank: int, kind: dtype) -> AdapterProducts:
        """The products of up to `num_places` adapters of up to `max_rank`, in a model that computes in `kind`.

        Raises:
            ValueError: these kernels have no such products: `adapter_refusal`.
        """
        ...

    def embedding(self, table: QuantizedMatrix, kind: dtype, scale: float = 1.0) -> Callable[[Tensor], Tensor]:
        """Pack `table [vocabulary, hidden]` for `embed`: from token ids `[tokens]` int64 to `[tokens, hidden]`.

        Rows are dequantized, multiplied by `scale` and rounded to `kind`.  A `head` of the same matrix shares memory.
        """
        ...

    def linear_bytes(self, weight: Weight) -> int:
        """Bytes of a packed `linear`.  Only shape and type of the weight are read."""
        ...

    def head_bytes(self, weight: Weight) -> int:
        """Bytes of a packed `head`."""
        ...

    def library_bytes(self, kind: dtype) -> int:
        """The most bytes of host memory that a library keeps for products with weights of `kind`, weights excluded."""
        ...

    def graph_size(self, tokens: int, context: int) -> tuple[int, int]:
        """The size of the graph that serves a step: its tokens (one per row, and drafts) and its tokens of context.

        0 tokens where running a graph gains nothing.  More tokens or more context never give a smaller graph.
        """
        ...

    def record(self, work: Callable[[], Tensor]) -> Graph | None:
        """Run `work`, which calls these kernels alone, and capture it as a graph.

        Returns None without running `work` where that is not possible.
        """
        ...

    def rowwise(self, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """`function(*inputs)`, computed by torch from tensors `[tokens, ...]`: for what only a few families compute.

        Each row of the result must depend on the same row of the inputs alone, bit for bit: no products, which belong
        to `linear`.  A graph calls the function again between its kernels.
        """
        ...

    def embed(self, table: Tensor, token_ids: Tensor, first: int | None = None) -> Tensor:
        """Rows of `table [vocabulary, hidden]` by `token_ids [tokens]` int64: `[tokens, hidden]`.

        With `first`, the table is a part of one that begins with the row of that id; ids outside give zeros.
        """
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        """RMSNorm over the last dimension of `x [tokens, hidden]`; `offset` is added to the weight in float32.

        `x` may be the residual stream, of `wide_kind`; the result has the weight's type.
        """
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        """`residual += x` in place, then RMSNorm of the sum, `[tokens, hidden]`, in the type of `x`.

        `residual` has the type of `x` or its `wide_kind`.
        """
        ...

    def layer_norm(self, x: Tensor, norm: LayerNormWeights, residual: Tensor | None = None) -> Tensor:
        """LayerNorm over the last dimension of `x [tokens, hidden]`, or of `residual += x`, in place, as stored.

        Types are those of `rms_norm` and `add_rms_norm`; a norm of the residual stream must have a weight or a bias.
        """
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

    def activate(self, x: Tensor, activation: Activation, *, is_gated: bool = False) -> Tensor:
        """`activation(x)` of `x [tokens, size]`, or of `[gate, up] = x` of half that size `activation(gate) * up`."""
        ...

    def clamped_swiglu(self, gate_up: Tensor, activation: ClampedSwiGLU) -> Tensor:
        """`activation` of `gate_up [tokens, 2 * intermediate]`."""
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
        biases: Tensor | None = None,
    ) -> Tensor:
        """Attention of every row over its own cached context: `[tokens, heads * head_dim]`.

        `sinks [heads]` float32 are scores without a value: each takes part in the softmax of its head's queries
        (GPT-OSS), after the soft cap, and regardless of the window.  `biases [heads, positions]` float32 are added to
        the scores of keys at these positions, after the soft cap (ALiBi, Press et al., 2022); `shape` says so.
        Relative ones are `[heads, 2 * positions - 1]`, that of a query's own position in the middle.
        """
        ...


def in_two_steps(
    kernels: Kernels, weight: Weight, bias: Tensor | None, activation: Activation | PlainActivation = "silu",
) -> Linear:
    """For kernels that do not fuse the activation, the product, then the activation: `gated`, or `linear` with one."""
    product, multiply = kernels.linear(weight, bias), activated(kernels, activation)
    return lambda x: multiply(product(x))


def activated(kernels: Kernels, activation: ExpertActivation) -> Linear:
    """The function that applies an activation: `[tokens, 2 * intermediate] -> [tokens, intermediate]`.

    Without gates it keeps the size.
    """
    if isinstance(activation, PlainActivation):
        return functools.partial(kernels.activate, activation=activation.name)
    if isinstance(activation, ClampedSwiGLU):
        return lambda gate_up: kernels.clamped_swiglu(gate_up, activation)
    if activation == "silu":
        return kernels.silu_mul
    if activation == "gelu_tanh":
        return kernels.gelu_mul
    return functools.partial(kernels.activate, activation=activation, is_gated=True)
