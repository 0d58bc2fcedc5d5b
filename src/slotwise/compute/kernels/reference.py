"""The contract and sampling in plain torch: slow, short, obviously right.

All other implementations are tested against it.  Its parts, in this order: the paged cache, the router of experts,
adapters, `ReferenceKernels`, layers with a recurrent state, and sampling.

Arithmetic is float32 for tensors of any type, rounded once where a result is stored.  Attention reads only the cache
places that a query may see, so the contents of other places never matter.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, int8

from slotwise.compute.kernels.group import embed_part
from slotwise.compute.kernels.interface import (
    CACHE_KINDS,
    FP8_LARGEST,
    LENGTH_EPS,
    NO_ADAPTER,
    Activation,
    AttentionShape,
    ClampedSwiGLU,
    ConvolutionShape,
    ConvolutionWeights,
    DeltaShape,
    DeltaWeights,
    ExpertActivation,
    ExpertGroups,
    ExpertWeights,
    LatentNorm,
    LatentShape,
    LayerNormWeights,
    LayerShape,
    Linear,
    LowRank,
    Mixture,
    PlainActivation,
    QKNorm,
    RaggedBatch,
    Routing,
    SelectiveInputs,
    SelectiveShape,
    SelectiveWeights,
    SharedNorm,
    StateShape,
    StateSpaceShape,
    StateSpaceWeights,
    activated,
    cache_kind,
    in_two_steps,
)
from slotwise.compute.kernels.matrix import Format, QuantizedMatrix, Weight


def as_bytes(x: Tensor) -> Tensor:
    """`x` itself, or for one-byte elements that torch does not index, a view as int8, which it does."""
    return x.view(int8) if x.itemsize == 1 else x


class PagedCache(NamedTuple):
    """One layer's keys and values, `[blocks, block_size, kv_heads, head_dim]`: views of one storage.

    A block's bytes lie together, so that layers of other kinds may keep their states in it.
    """

    storage: Tensor  # [blocks, bytes] uint8
    block_size: int
    keys: Tensor
    values: Tensor

    def write(self, places: Tensor, keys: Tensor, values: Tensor) -> None:
        """Set `places [tokens]` to float32 `[tokens, kv_heads, head_dim]`."""
        at = places // self.block_size, places % self.block_size
        for stored, new in ((self.keys, keys), (self.values, values)):
            as_bytes(stored)[at] = as_bytes(narrowed(new, stored.dtype))

    def read(self, blocks: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values at these places, as float32."""
        places = blocks, offsets
        kind = self.keys.dtype
        return as_bytes(self.keys)[places].view(kind).float(), as_bytes(self.values)[places].view(kind).float()


class QuantizedPagedCache(NamedTuple):
    """int8 keys and values, with a scale for each token and head, `[blocks, block_size, kv_heads]` float32."""

    storage: Tensor  # [blocks, bytes] uint8
    block_size: int
    keys: Tensor
    values: Tensor
    key_scales: Tensor
    value_scales: Tensor

    def write(self, places: Tensor, keys: Tensor, values: Tensor) -> None:
        """Set `places [tokens]` to quantized float32 `[tokens, kv_heads, head_dim]`."""
        at = places // self.block_size, places % self.block_size
        for stored, scales, new in ((self.keys, self.key_scales, keys), (self.values, self.value_scales, values)):
            stored[at], scales[at] = quantize(new)

    def read(self, blocks: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        """Dequantized keys and values at these places, as float32."""
        places = blocks, offsets
        return (self.keys[places] * self.key_scales[places].unsqueeze(-1),
                self.values[places] * self.value_scales[places].unsqueeze(-1))


class StateCache(NamedTuple):
    """One layer's recurrent states."""

    storage: Tensor  # [blocks, bytes] uint8
    block_size: int


class LatentCache(NamedTuple):
    """One layer's latents and rotary keys, `[blocks, block_size, rank + rope_dim]`; int8 with a scale for each token.
    """

    storage: Tensor  # [blocks, bytes] uint8
    block_size: int
    rows: Tensor
    scales: Tensor | None  # [blocks, block_size] float32

    def write(self, places: Tensor, new: Tensor) -> None:
        """Set `places [tokens]` to float32 `[tokens, rank + rope_dim]`."""
        at = places // self.block_size, places % self.block_size
        if self.scales is None:
            as_bytes(self.rows)[at] = as_bytes(narrowed(new, self.rows.dtype))
        else:
            self.rows[at], self.scales[at] = quantize(new)

    def read(self, blocks: Tensor, offsets: Tensor) -> Tensor:
        """The rows at these places, as float32."""
        places, kind = (blocks, offsets), self.rows.dtype
        rows = as_bytes(self.rows)[places].view(kind).float()
        return rows if self.scales is None else rows * self.scales[places].unsqueeze(-1)


def cache_bytes_per_block(block_size: int, shape: LayerShape, kind: torch.dtype) -> int:
    """Bytes one block takes in one layer, in a cache of `kind`."""
    if isinstance(shape, StateShape):
        return shape.state_bytes
    if isinstance(shape, LatentShape):
        return sum(_latent_sizes(block_size, shape, kind))
    return sum(_sizes(block_size, shape, kind))


ReferenceCache = PagedCache | QuantizedPagedCache | StateCache | LatentCache


def allocate_cache(
    num_blocks: int, block_size: int, shape: LayerShape, kind: torch.dtype, device: torch.device,
) -> ReferenceCache:
    """A zeroed cache of `kind`."""
    size = num_blocks, cache_bytes_per_block(block_size, shape, kind)
    storage = torch.zeros(size, dtype=torch.uint8, device=device)
    if isinstance(shape, StateShape):
        return StateCache(storage, block_size)
    if isinstance(shape, LatentShape):
        rows, *rest = storage.split(_latent_sizes(block_size, shape, kind), dim=1)
        return LatentCache(storage, block_size, rows.view(kind).view(num_blocks, block_size, shape.width),
                           rest[0].view(torch.float32) if rest else None)
    of_token = num_blocks, block_size, shape.num_kv_heads
    keys, values, *scales = storage.split(_sizes(block_size, shape, kind), dim=1)
    keys, values = (part.view(kind).view(*of_token, shape.head_dim) for part in (keys, values))
    if not scales:
        return PagedCache(storage, block_size, keys, values)
    key_scales, value_scales = (part.view(torch.float32).view(of_token) for part in scales)
    return QuantizedPagedCache(storage, block_size, keys, values, key_scales, value_scales)


def states_of(cache: ReferenceCache, shape: StateShape) -> Tensor:
    """The states that the blocks hold, `[blocks, floats]` float32."""
    return cache.storage[:, : shape.state_bytes].view(torch.float32)


def _sizes(block_size: int, shape: AttentionShape, kind: torch.dtype) -> list[int]:
    """Bytes of a block's keys, values and, for int8, their scales."""
    heads = block_size * shape.num_kv_heads
    numbers = [heads * shape.head_dim * kind.itemsize] * 2
    return numbers + [heads * torch.float32.itemsize] * 2 if kind == int8 else numbers


def _latent_sizes(block_size: int, shape: LatentShape, kind: torch.dtype) -> list[int]:
    """Bytes of a block's latents with their rotary keys and, for int8, their scales."""
    scales = [block_size * torch.float32.itemsize] if kind == int8 else []
    return [block_size * shape.width * kind.itemsize, *scales]


def narrowed(x: Tensor, kind: torch.dtype) -> Tensor:
    """`x` as another float type.  Values beyond fp8's range become its largest number; torch would make them NaN."""
    return (x.clamp(-FP8_LARGEST, FP8_LARGEST) if kind == torch.float8_e4m3fn else x).to(kind)


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """`x [..., head_dim]` as int8 in -127 ... 127, and the scales `[...]` float32."""
    scales = x.float().abs().amax(-1) / 127
    return (x.float() / scales.clamp_min(1e-30 / 127).unsqueeze(-1)).round().nan_to_num_().to(int8), scales


def route(logits: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """A token's experts, the best first, and their shares: `[tokens, top_k]` int64 and float32.

    Equal values keep their order.
    """
    logits = logits.float()
    scores = logits.sigmoid() if routing.scoring == "sigmoid" else logits.softmax(-1)
    values = scores if routing.chooses_by_scores else logits
    if routing.correction is not None:
        values = values + routing.correction
    if routing.groups is not None:
        values = values.masked_fill(~_in_kept_groups(values, routing.groups), float("-inf"))
    chosen = values.sort(dim=-1, descending=True, stable=True).indices[:, : routing.top_k]
    if routing.scoring == "sparse_mixer":
        shares = _sparse_mixer(logits, chosen, routing.jitter)
    else:
        shares = scores.gather(1, chosen)
    if routing.is_normalized:
        shares = shares / shares.sum(-1, keepdim=True).clamp_min(routing.least_sum)
    return chosen, shares * routing.scale


def _in_kept_groups(values: Tensor, groups: ExpertGroups) -> Tensor:
    """Whether a token may choose each expert: `[tokens, experts]` bool."""
    of_groups = values.unflatten(-1, (groups.number, -1))
    ranks = of_groups.topk(groups.num_best, dim=-1).values.sum(-1).sort(dim=-1, descending=True, stable=True).indices
    kept = torch.zeros(of_groups.shape[:2], dtype=torch.bool, device=values.device)
    kept.scatter_(1, ranks[:, : groups.kept], torch.tensor(1, dtype=torch.bool).expand_as(ranks[:, : groups.kept]))
    return kept.repeat_interleave(of_groups.shape[-1], dim=-1)


def _sparse_mixer(logits: Tensor, chosen: Tensor, jitter: float) -> Tensor:
    """The softmax of each chosen expert over those left that are not much less."""
    shares, left = [], logits
    for expert in chosen.split(1, dim=1):
        best = logits.gather(1, expert)
        much_less = (best - logits) / torch.maximum(logits.abs(), best) > 2 * jitter
        shares.append(left.masked_fill(much_less, float("-inf")).softmax(-1).gather(1, expert))
        left = left.scatter(1, expert, float("-inf"))
    return torch.cat(shares, dim=1)


class ReferenceAdapters:
    """`AdapterProducts` in plain torch."""

    def __init__(self, num_places: int) -> None:
        self.num_places = num_places
        self.places: Sequence[int] = ()

    @property
    def are_any(self) -> bool:
        return any(place != NO_ADAPTER for place in self.places)

    def assign(self, places: Sequence[int]) -> None:
        self.places = places

    def select(self, rows: Tensor) -> None:
        self.places = [self.places[row] for row in rows.tolist()] if self.are_any else ()

    def product(self, outputs: int, inputs: int, num_parts: int) -> _ReferenceAddedProduct:
        return _ReferenceAddedProduct(self)


class _ReferenceAddedProduct:
    """Adds the terms adapter by adapter."""

    def __init__(self, adapters: ReferenceAdapters) -> None:
        self._adapters = adapters
        self._factors: list[LowRank | None] = [None] * adapters.num_places

    def pack(self, factors: LowRank) -> LowRank:
        return factors

    def set(self, place: int, packed: LowRank | None) -> None:
        self._factors[place] = packed

    def add(self, x: Tensor, out: Tensor) -> Tensor:
        places = torch.tensor(self._adapters.places, device=x.device)
        for place in places.unique().tolist():
            factors = None if place == NO_ADAPTER else self._factors[place]
            if factors is None:
                continue
            rows = (places == place).nonzero()[:, 0]
            added = torch.zeros(len(rows), out.shape[1], device=x.device)
            if factors.bias is not None:
                added += factors.bias.float()
            for first, a, b in factors.parts:
                added[:, first : first + len(b)] += x[rows].float() @ a.float().T @ b.float().T
            out[rows] = (out[rows].float() + added).to(out.dtype)
        return out


class ReferenceKernels:
    """Plain torch, any float type, any device."""

    name = "reference"
    kinds: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16, torch.float32)
    records_drafts = False
    mixture_refusal = adapter_refusal = state_refusal = ""

    def __init__(self, device: str = "cpu", kv_cache_dtype: str = "auto") -> None:
        """Raises ValueError if `kv_cache_dtype` is not in `CACHE_KINDS`."""
        self.device = torch.device(device)
        self._cached = cache_kind(kv_cache_dtype, self.name, tuple(CACHE_KINDS))

    def warm_up(self, kind: torch.dtype) -> None:
        """Nothing: plain torch is always ready."""

    def product_path(self, kind: torch.dtype) -> str:
        """Always torch."""
        return "torch"

    def batch_dependence(self, kind: torch.dtype) -> str:
        """torch chooses its kernels by the number of rows."""
        return "on device reference torch's products depend on the number of rows: choose device cpu"

    def operations_per_second(self, kind: torch.dtype) -> float:
        """Infinite: steps on the reference are not bounded."""
        return float("inf")

    def refusal(self, shape: AttentionShape | LatentShape) -> str:
        """Nothing is refused."""
        return ""

    def allocate_cache(
        self, num_blocks: int, block_size: int, shape: LayerShape, kind: torch.dtype,
    ) -> ReferenceCache:
        """One layer's zeroed cache of `num_blocks` blocks of `block_size` tokens."""
        return allocate_cache(num_blocks, block_size, shape, self._cached or kind, self.device)

    def cache_bytes_per_block(self, block_size: int, shape: LayerShape, kind: torch.dtype) -> int:
        """Bytes one block takes in one layer, keys and values together."""
        return cache_bytes_per_block(block_size, shape, self._cached or kind)

    def cache_pieces(self, cache: ReferenceCache) -> tuple[Tensor, ...]:
        """The whole storage, as bytes."""
        return (cache.storage.view(torch.int8),)

    def format_refusal(self, format: Format, kind: torch.dtype) -> str:
        """Nothing is refused."""
        return ""

    def linear(self, weight: Weight, bias: Tensor | None = None, activation: Activation | None = None) -> Linear:
        """`weight [out, in]` as a product over the last dimension; a quantized one in float32, dequantized."""
        if activation is not None:
            return in_two_steps(self, weight, bias, PlainActivation(activation))
        if isinstance(weight, Tensor):
            return lambda x: F.linear(x, weight, bias)
        floats, added = weight.dequantized().to(self.device), None if bias is None else bias.float()
        return lambda x: F.linear(x.float(), floats, added).to(x.dtype)

    def gated(self, weight: Weight, bias: Tensor | None = None, activation: Activation = "silu") -> Linear:
        """A product, then its activation."""
        return in_two_steps(self, weight, bias, activation)

    def exact_linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """A product like any other."""
        return self.linear(weight, bias)

    def experts(
        self, weights: Iterable[ExpertWeights], routing: Routing, activation: ExpertActivation, ends: Tensor,
    ) -> Mixture:
        """Expert by expert, the tokens that chose it."""
        packed = {number: (self.linear(each.gate_up, each.gate_up_bias), self.linear(each.down, each.down_bias))
                  for number, each in zip(routing.experts, weights, strict=True)}
        activate = activated(self, activation)

        def mixture(x: Tensor, logits: Tensor) -> Tensor:
            chosen, shares = route(logits, routing)
            ends.add_(chosen.flatten().bincount(minlength=routing.num_experts).cumsum(0))
            out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
            for expert in sorted(packed.keys() & set(chosen.flatten().tolist())):
                tokens, places = (chosen == expert).nonzero(as_tuple=True)
                (gate_up, down), share, given = packed[expert], shares[tokens, places, None], x[tokens]
                if routing.scales_inputs:
                    out[tokens] += down(activate(gate_up((share * given).to(x.dtype)))).float()
                else:
                    out[tokens] += share * down(activate(gate_up(given))).float()
            return out.to(x.dtype)

        return mixture

    def adapters(self, num_places: int, max_rank: int, kind: torch.dtype) -> ReferenceAdapters:
        """Adapter by adapter."""
        return ReferenceAdapters(num_places)

    def wide_kind(self, kind: torch.dtype) -> torch.dtype:
        """That of the hidden states."""
        return kind

    def convert(self, x: Tensor, kind: torch.dtype) -> Tensor:
        """`x` as another type; `x` itself where it has that type."""
        return x.to(kind)

    def head(self, weight: Weight, bias: Tensor | None = None) -> Linear:
        """A product like any other."""
        return self.linear(weight, bias)

    def embedding(self, table: QuantizedMatrix, kind: torch.dtype, scale: float = 1.0) -> Callable[[Tensor], Tensor]:
        """Rows of the dequantized table."""
        floats = (table.dequantized().to(self.device) * scale).to(kind)
        return lambda token_ids: self.embed(floats, token_ids)

    def linear_bytes(self, weight: Weight) -> int:
        """Bytes of the unpacked weight."""
        return weight.shape.numel() * (weight.dtype if isinstance(weight, Tensor) else torch.float32).itemsize

    head_bytes = linear_bytes

    def library_bytes(self, kind: torch.dtype) -> int:
        """0: plain torch's caches are not counted."""
        return 0

    def graph_size(self, tokens: int, context: int) -> tuple[int, int]:
        """No rows: nothing is captured."""
        return 0, context

    def record(self, work: Callable[[], Tensor]) -> None:
        """None: plain torch is not captured."""

    def rowwise(self, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """`function(*inputs)`."""
        return function(*inputs)

    def embed(self, table: Tensor, token_ids: Tensor, first: int | None = None) -> Tensor:
        """Rows of `table [vocabulary, hidden]`: `[tokens, hidden]`."""
        return table.index_select(0, token_ids) if first is None else embed_part(table, token_ids - first)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        """RMSNorm (Zhang and Sennrich, 2019) over the last dimension of `x [tokens, hidden]`."""
        return _rms_norm(x.float(), weight, eps, offset).to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        """`residual += x` in place, then RMSNorm of the sum as stored: `[tokens, hidden]`."""
        residual += x
        return self.rms_norm(residual, weight, eps, offset)

    def layer_norm(self, x: Tensor, norm: LayerNormWeights, residual: Tensor | None = None) -> Tensor:
        """LayerNorm (Ba et al., 2016) of `x [tokens, hidden]`, or of `residual += x`, in place, as stored."""
        if residual is not None:
            x = residual.add_(x)
        weight = None if norm.weight is None else norm.weight.float() + norm.offset
        bias = None if norm.bias is None else norm.bias.float()
        return F.layer_norm(x.float(), x.shape[-1:], weight, bias, norm.eps).to(x.dtype)

    def add(self, x: Tensor, residual: Tensor, gate: Tensor | None = None) -> Tensor:
        """`residual += x` in place, or `residual += sigmoid(gate) * x`; returns `residual`."""
        if gate is None:
            residual += x
        else:
            residual.copy_(residual.float() + gate.float().sigmoid() * x.float())
        return residual

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """`silu(gate) * up` for `gate_up [tokens, 2 * intermediate]`."""
        gate, up = gate_up.float().chunk(2, dim=-1)
        return (F.silu(gate) * up).to(gate_up.dtype)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        """`gelu(gate) * up`, with GELU's approximation by tanh."""
        gate, up = gate_up.float().chunk(2, dim=-1)
        return (F.gelu(gate, approximate="tanh") * up).to(gate_up.dtype)

    def activate(self, x: Tensor, activation: Activation, *, is_gated: bool = False) -> Tensor:
        """`activation(x)`, or `activation(gate) * up`."""
        if not is_gated:
            return FUNCTIONS[activation](x.float()).to(x.dtype)
        gate, up = x.float().chunk(2, dim=-1)
        return (FUNCTIONS[activation](gate) * up).to(x.dtype)

    def clamped_swiglu(self, gate_up: Tensor, activation: ClampedSwiGLU) -> Tensor:
        """`(clamp(up) + 1) * g * sigmoid(alpha * g)`, with `g = min(gate, limit)`."""
        gate, up = gate_up.float().chunk(2, dim=-1)
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
        return ((up + 1) * gate * torch.sigmoid(activation.alpha * gate)).to(gate_up.dtype)

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        """`cap * tanh(x / cap)`; NaN and infinities stay what they are."""
        return torch.where(x.isfinite(), _soft_cap(x.float(), cap).to(x.dtype), x)

    def sigmoid_mul(self, gate: Tensor, x: Tensor) -> Tensor:
        """`sigmoid(gate) * x`."""
        return (gate.float().sigmoid() * x.float()).to(x.dtype)

    def gated_convolution(
        self, bcx: Tensor, weights: ConvolutionWeights, cache: ReferenceCache, batch: RaggedBatch,
        shape: ConvolutionShape,
    ) -> Tensor:
        """The convolution between its gates."""
        def advance(state: Tensor, part: slice) -> Tensor:
            b, c, x = bcx[part].float().chunk(3, dim=1)
            return _convolved(state, b * x, weights, shape) * c

        return self._advanced(bcx, shape.size, cache, batch, shape, advance)

    def silu_convolution(
        self, x: Tensor, weights: ConvolutionWeights, cache: ReferenceCache, batch: RaggedBatch, shape: SelectiveShape,
    ) -> Tensor:
        """The convolution and SiLU."""
        def advance(state: Tensor, part: slice) -> Tensor:
            return F.silu(_convolved(state, x[part].float(), weights, shape))

        return self._advanced(x, shape.size, cache, batch, shape, advance, slice(shape.rule_floats, None))

    def selective_scan(
        self, inputs: SelectiveInputs, weights: SelectiveWeights, cache: ReferenceCache, batch: RaggedBatch,
        shape: SelectiveShape,
    ) -> Tensor:
        """Mamba's rule, token by token."""
        def advance(state: Tensor, part: slice) -> Tensor:
            return _selective(state, SelectiveInputs(*[each[part].float() for each in inputs]), weights, shape)

        return self._advanced(inputs.x, shape.size, cache, batch, shape, advance, slice(shape.rule_floats))

    def state_space(
        self, mixed: Tensor, weights: StateSpaceWeights, cache: ReferenceCache, batch: RaggedBatch,
        shape: StateSpaceShape,
    ) -> Tensor:
        """Mamba-2's rule, token by token."""
        def advance(state: Tensor, part: slice) -> Tensor:
            return _state_space(state, mixed[part].float(), weights, shape)

        return self._advanced(mixed, shape.values, cache, batch, shape, advance)

    def gated_delta(
        self, mixed: Tensor, gates: Tensor, weights: DeltaWeights, cache: ReferenceCache, batch: RaggedBatch,
        shape: DeltaShape,
    ) -> Tensor:
        def advance(state: Tensor, part: slice) -> Tensor:
            return _delta_rule(state, mixed[part].float(), gates[part].float(), weights, shape)

        return self._advanced(mixed, shape.values, cache, batch, shape, advance)

    def _advanced(
        self, like: Tensor, width: int, cache: ReferenceCache, batch: RaggedBatch, shape: StateShape,
        advance: Callable[[Tensor, slice], Tensor], part: slice = slice(None),
    ) -> Tensor:
        """Row by row, block by block; `advance(state, tokens)` changes `state [floats]`, and returns their results.

        `part` is the part of a state that is read and written.
        Returns `[tokens, width]`, of the type of `like [tokens, ...]`.
        """
        out, states, block_size = like.new_empty(len(like), width), states_of(cache, shape)[:, part], cache.block_size
        starts = batch.query_starts.tolist()
        on_trial = [0] * len(starts) if batch.on_trial is None else batch.on_trial.tolist()
        for row, context in enumerate(batch.context_lens.tolist()):
            first, end = starts[row], starts[row + 1]
            position, table = context - (end - first), batch.block_tables[row].tolist()
            state = states[table[(position - 1) // block_size]].clone() if position else torch.zeros_like(states[0])
            while first < end:
                stop = min(end, first + block_size - position % block_size)
                out[first:stop] = advance(state, slice(first, stop)).to(out.dtype)
                if not on_trial[row]:
                    states[table[position // block_size]] = state
                first, position = stop, position + stop - first
        return out

    def rotary_store(
        self, qkv: Tensor, rotary: Tensor, batch: RaggedBatch, cache: PagedCache | QuantizedPagedCache,
        shape: AttentionShape, norm: QKNorm | None,
    ) -> Tensor:
        """Split, norm and rotate; keys and values go to `batch.slot_mapping`; queries `[tokens, heads, head_dim]`."""
        heads, kv_heads = shape.num_heads, shape.num_kv_heads
        query, key, value = (
            qkv.view(len(qkv), -1, shape.head_dim).float().split([heads, kv_heads, kv_heads], dim=1)
        )
        if norm is not None and norm.shared is not None:
            query, key = _normed(query, key, norm, norm.shared)
        elif norm is not None:
            query, key = (  # a head, or all heads, in the last dimension
                _rms_norm(part.reshape(len(qkv), -1, len(weight)), weight, norm.eps, norm.offset).view(part.shape)
                for part, weight in ((query, norm.query), (key, norm.key)))
        cosine, sine = rotary[batch.positions].unsqueeze(1).chunk(2, dim=-1)  # [tokens, 1, head_dim / 2]
        cache.write(batch.slot_mapping, _rotate(key, cosine, sine), value)
        return _rotate(query, cosine, sine).to(qkv.dtype)

    def attention(
        self, query: Tensor, cache: PagedCache | QuantizedPagedCache, batch: RaggedBatch, shape: AttentionShape,
        sinks: Tensor | None = None, biases: Tensor | None = None,
    ) -> Tensor:
        """Attention of every row over its own cached context: `[tokens, heads * head_dim]`."""
        out = torch.empty_like(query)
        starts, contexts = batch.query_starts.tolist(), batch.context_lens.tolist()
        for row, context_len in enumerate(contexts):
            rows = slice(starts[row], starts[row + 1])
            out[rows] = _attend_row(query[rows], cache, batch.block_tables[row], context_len, shape, sinks, biases)
        return out.flatten(1)

    def latent_products(self, key_up: Tensor, value_up: Tensor) -> tuple[Tensor, Tensor]:
        """Both weights, in float32."""
        return key_up.float(), value_up.float()

    def latent_store(
        self, query: Tensor, compressed: Tensor, rotary: Tensor, batch: RaggedBatch, cache: LatentCache,
        shape: LatentShape, norm: LatentNorm,
    ) -> Tensor:
        """Latents, normed, and keys, rotated, to the cache; the rotary part of queries is rotated in place."""
        latents, keys = compressed.float().split([shape.rank, shape.rope_dim], dim=1)
        cosine, sine = rotary[batch.positions].unsqueeze(1).chunk(2, dim=-1)
        normed = _rms_norm(latents, norm.weight, norm.eps, 0.0)
        keys = _rotate(_halves(keys.unsqueeze(1), shape), cosine, sine)[:, 0]
        cache.write(batch.slot_mapping, torch.cat((normed, keys), dim=1))
        parts = query.view(len(query), shape.num_heads, shape.query_dim)[..., shape.nope_dim :]
        parts.copy_(_rotate(_halves(parts.float(), shape), cosine, sine))
        return query

    def latent_attention(
        self, query: Tensor, cache: LatentCache, batch: RaggedBatch, shape: LatentShape,
        products: tuple[Tensor, Tensor],
    ) -> Tensor:
        """Row by row, with the keys and values of every head made from the latents."""
        key_up, value_up = products
        out = query.new_empty(len(query), shape.num_heads, shape.value_dim)
        heads = query.view(len(query), shape.num_heads, shape.query_dim).float()
        starts = batch.query_starts.tolist()
        for row, context_len in enumerate(batch.context_lens.tolist()):
            part = slice(starts[row], starts[row + 1])
            places = torch.arange(context_len, device=query.device)
            blocks = batch.block_tables[row][places // cache.block_size].long()
            latents, rotated = cache.read(blocks, places % cache.block_size).split([shape.rank, shape.rope_dim], dim=1)
            keys = torch.cat((torch.einsum("kr,hnr->khn", latents, key_up),
                              rotated[:, None].expand(-1, shape.num_heads, -1)), dim=-1)
            scores = torch.einsum("qhd,khd->hqk", heads[part], keys) * shape.scale
            back = torch.arange(context_len - (part.stop - part.start), context_len, device=query.device)[:, None]
            weights = scores.masked_fill(back < places, float("-inf")).softmax(-1)
            values = torch.einsum("kr,hvr->khv", latents, value_up)
            out[part] = torch.einsum("hqk,khv->qhv", weights, values).to(out.dtype)
        return out.flatten(1)


def _halves(x: Tensor, shape: LatentShape) -> Tensor:
    """Rotary dimensions `[..., rope_dim]` with pairs in halves."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) if shape.has_neighbors else x


FUNCTIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu, "gelu_tanh": functools.partial(F.gelu, approximate="tanh"), "gelu": F.gelu,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x), "relu": F.relu, "relu2": lambda x: F.relu(x).square()}


def _rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (weight.float() + offset)


def _normed(query: Tensor, key: Tensor, norm: QKNorm, shared: SharedNorm) -> list[Tensor]:
    """`query` and `key [tokens, heads, head_dim]`, normed over the heads of all ranks."""
    squares = shared.add_up(torch.stack([part.square().sum((1, 2)) for part in (query, key)], 1))
    factors = torch.rsqrt(squares / squares.new_tensor(shared.numbers) + norm.eps)  # [tokens, 2]
    weights = [(weight.float() + norm.offset).view(part.shape[1:]) for weight, part in (
        (norm.query, query), (norm.key, key))]
    return [part * factors[:, at, None, None] * weights[at] for at, part in enumerate((query, key))]


def _soft_cap(x: Tensor, cap: float) -> Tensor:
    return cap * torch.tanh(x / cap)


def _rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary embedding (Su et al., 2021) of `x [tokens, heads, head_dim]`, first half paired with second."""
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cosine - high * sine, high * cosine + low * sine), dim=-1)


def _first_seen(position: int, shape: AttentionShape) -> int:
    if shape.is_chunked:
        return position // shape.window * shape.window
    return max(0, position - shape.window + 1) if shape.window else 0


def _attend_row(
    query: Tensor, cache: PagedCache | QuantizedPagedCache, table: Tensor, context_len: int, shape: AttentionShape,
    sinks: Tensor | None, biases: Tensor | None,
) -> Tensor:
    """Attention of one row's `query [tokens, heads, head_dim]`, the last tokens of its context."""
    first_query = context_len - len(query)
    first = _first_seen(first_query, shape)
    places = torch.arange(first, context_len, device=query.device)
    block_size = cache.keys.shape[1]
    blocks, offsets = table[places // block_size].long(), places % block_size
    group = shape.num_heads // shape.num_kv_heads
    keys, values = (part.repeat_interleave(group, dim=1) for part in cache.read(blocks, offsets))
    scores = torch.einsum("qhd,khd->hqk", query.float(), keys) * shape.scale
    if shape.soft_cap:
        scores = _soft_cap(scores, shape.soft_cap)
    if biases is not None:
        columns = places if not shape.has_relative_biases else (
            places - torch.arange(first_query, context_len, device=query.device)[:, None] + biases.shape[1] // 2)
        scores = scores + (biases[:, columns] if columns.dim() > 1 else biases[:, None, columns])
    back = torch.arange(first_query, context_len, device=query.device)[:, None] - places
    hidden = back < -shape.ahead
    if shape.is_chunked:
        hidden |= places // shape.window < (places[-len(query) :, None] // shape.window)
    elif shape.window:
        hidden |= back >= shape.window
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is None:
        weights = scores.softmax(-1)
    else:  # one more score, whose weight multiplies no value
        scores = torch.cat((scores, sinks[:, None, None].expand(-1, len(query), 1)), dim=-1)
        weights = scores.softmax(-1)[..., :-1]
    return torch.einsum("hqk,khd->qhd", weights, values).to(query.dtype)


def _convolved(state: Tensor, x: Tensor, weights: ConvolutionWeights, shape: StateShape) -> Tensor:
    """The short convolution of `x [tokens, channels]`, whose last inputs become those of `state`, at its end."""
    before, tokens = state[len(state) - (shape.taps - 1) * shape.channels :], len(x)
    seen = torch.cat((before.view(shape.taps - 1, shape.channels), x))
    out = sum((seen[tap : tap + tokens] * weight for tap, weight in enumerate(weights.taps)), torch.zeros(()))
    before.copy_(seen[tokens:].flatten())
    return out if weights.bias is None else out + weights.bias


def _selective(state: Tensor, inputs: SelectiveInputs, weights: SelectiveWeights, shape: SelectiveShape) -> Tensor:
    matrix, out = state[: shape.rule_floats].view(shape.state_size, shape.size), torch.empty_like(inputs.x)
    per_group, steps = shape.size // shape.num_groups, F.softplus(inputs.steps)
    b, c = (each.unflatten(1, (shape.num_groups, -1)).transpose(1, 2).repeat_interleave(per_group, dim=2)
            for each in (inputs.b, inputs.c))  # [tokens, state_size, channels]
    for token, (x, step) in enumerate(zip(inputs.x, steps, strict=True)):
        matrix.mul_(torch.exp(weights.rate * step)).add_(b[token] * (step * x))
        out[token] = (c[token] * matrix).sum(0) + weights.skip * x
    return out * F.silu(inputs.gate)


def _state_space(state: Tensor, mixed: Tensor, weights: StateSpaceWeights, shape: StateSpaceShape) -> Tensor:
    heads, groups, size, tokens = shape.num_heads, shape.num_groups, shape.state_size, len(mixed)
    z, x, raw = mixed.split([shape.values, shape.channels, heads], dim=1)
    convolved = F.silu(_convolved(state, x, weights.convolution, shape))
    x, b, c = convolved.split([shape.values, groups * size, groups * size], dim=1)
    x, b, c = x.view(tokens, heads, -1), *(
        each.view(tokens, groups, size).repeat_interleave(heads // groups, dim=1) for each in (b, c))
    steps = F.softplus(raw + weights.step_bias).clamp(shape.least_step, shape.largest_step)
    decay, matrix = torch.exp(weights.rate * steps), state[: shape.rule_floats].view(heads, shape.head_dim, size)
    out = torch.empty_like(x)
    for token in range(tokens):
        matrix *= decay[token, :, None, None]
        matrix += torch.einsum("hn,hp->hpn", b[token], steps[token, :, None] * x[token])
        out[token] = torch.einsum("hn,hpn->hp", c[token], matrix) + weights.skip[:, None] * x[token]
    return _gated(out.flatten(1), z, weights, shape)


def _gated(y: Tensor, z: Tensor, weights: StateSpaceWeights, shape: StateSpaceShape) -> Tensor:
    """Normed, in groups, and gated, in the order of `shape`."""
    y = y if shape.is_normed_first else y * F.silu(z)
    if weights.norm is not None:
        groups = y.unflatten(1, (shape.norm_groups, -1))
        y = (groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + weights.eps)).flatten(1) * weights.norm
    return y * F.silu(z) if shape.is_normed_first else y


def _delta_rule(state: Tensor, mixed: Tensor, gates: Tensor, weights: DeltaWeights, shape: DeltaShape) -> Tensor:
    """The gated delta rule, token by token."""
    tokens, heads = len(mixed), shape.num_value_heads
    x, z = mixed.split([shape.channels, shape.values], dim=1)
    mixed = F.silu(_convolved(state, x, ConvolutionWeights(weights.convolution), shape))
    keys = shape.num_key_heads * shape.key_dim
    query, key, value = mixed.split([keys, keys, shape.values], dim=1)
    query, key = (_of_length_1(part.view(tokens, -1, shape.key_dim)).repeat_interleave(
        heads // shape.num_key_heads, dim=1) for part in (query, key))
    b, a = gates.split([heads, shape.num_decays], dim=1)
    steps = F.softplus(a + weights.step_bias).view(tokens, heads, -1)
    decay = torch.exp(weights.rate[:, None] * steps)  # [tokens, heads, key_dim], or 1 in place of key_dim
    matrix = state[: shape.rule_floats].view(heads, shape.key_dim, shape.value_dim)
    beta, out = shape.beta_scale * b.sigmoid(), torch.empty_like(value)
    for token, known in enumerate(value.view(tokens, heads, -1)):
        matrix *= decay[token, :, :, None]
        error = known - torch.einsum("hk,hkv->hv", key[token], matrix)
        matrix += torch.einsum("hk,hv->hkv", key[token], beta[token, :, None] * error)
        out[token] = torch.einsum("hk,hkv->hv", query[token], matrix).flatten() * shape.key_dim**-0.5
    heads_out = out.view(tokens, heads, -1)
    normed = heads_out * torch.rsqrt(heads_out.square().mean(-1, keepdim=True) + weights.eps) * weights.norm
    return normed.flatten(1) * (z.sigmoid() if shape.is_gated_by_sigmoid else F.silu(z))


def _of_length_1(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + LENGTH_EPS)


Draw = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""`draw(logits, controls, seeds, indices)`: see `draw`."""

Mask = Callable[[Tensor, Tensor, Tensor], Tensor]
"""`mask(logits, rows, bits)`: see `allowed_only`; `logits` may be overwritten."""

FAILED = -1
"""Takes the place of a token in a row without a valid distribution."""

LOG2_E = math.log2(math.e)
_LOW = 0xFFFFFFFF


def draw(logits: Tensor, controls: Tensor, seeds: Tensor, indices: Tensor) -> Tensor:
    """A token for every row, `[rows]` int64; FAILED where a row holds NaN or +inf, or only -inf.

    The rules and random numbers are those of `cpu/sampling_filters.py`: min-p, top-k and top-p in this order, ties kept
    together, and one uniform number of Philox4x32-10 (Salmon et al., "Parallel Random Numbers", SC 2011) under key
    `seed` and counter `index`.  Sums are rounded differently: a token may differ where a cut or a draw falls between
    two.

    Args:
        logits: `[rows, vocab]` of any float type.
        controls: `[rows, 4]` float32: temperature (0 is greedy), top_k (0 keeps all), top_p, min_p.
        seeds: `[rows]` int64, 64 bits each.
        indices: `[rows]` int64, the number of outputs before this one.
    """
    scores = logits.float()
    temperature = controls[:, 0]
    largest = scores.amax(-1)
    failed = scores.isnan().any(-1) | largest.isinf()
    ids = torch.arange(scores.shape[1], device=scores.device)
    first = torch.where(scores == largest[:, None], ids, scores.shape[1]).amin(-1)
    scale = LOG2_E / torch.where(temperature > 0, temperature, 1)
    weights = _filtered(torch.exp2((scores - largest[:, None]) * scale[:, None]), controls)
    masses = weights.double().cumsum(-1)
    threshold = uniform(seeds, indices) * masses[:, -1]
    drawn = torch.where((masses > threshold[:, None]) & (weights > 0), ids, scores.shape[1]).amin(-1)
    return torch.where(failed, FAILED, torch.where(temperature > 0, drawn, first))


def _filtered(weights: Tensor, controls: Tensor) -> Tensor:
    """Weights `[rows, vocab]`, 0 for the tokens that are filtered out."""
    top_k, top_p, min_p = controls[:, 1].long(), controls[:, 2], controls[:, 3]
    vocab = weights.shape[1]
    weights = torch.where(weights >= min_p[:, None], weights, 0)
    falling = weights.sort(-1, descending=True).values
    last = torch.where((top_k > 0) & (top_k < vocab), top_k, vocab) - 1
    weights = torch.where(weights >= falling.gather(1, last[:, None]), weights, 0)
    falling = weights.sort(-1, descending=True).values
    masses = falling.double().cumsum(-1)
    enough = masses >= top_p[:, None] * masses[:, -1:]
    cut = falling.gather(1, enough.int().argmax(-1, keepdim=True))
    return torch.where((weights >= cut) | (top_p >= 1)[:, None], weights, 0)


def uniform(seeds: Tensor, indices: Tensor) -> Tensor:
    """A float64 in [0, 1) for every pair: 53 of the 128 bits that Philox4x32-10 yields.  Tensors of int64."""
    key_low, key_high = seeds & _LOW, (seeds >> 32) & _LOW
    a, b = indices & _LOW, (indices >> 32) & _LOW
    c, d = torch.zeros_like(a), torch.zeros_like(a)
    for _ in range(10):
        left, right = 0xD2511F53 * a, 0xCD9E8D57 * c  # wraps around, which leaves the 64 bits correct
        a, b = ((right >> 32) & _LOW) ^ b ^ key_low, right & _LOW
        c, d = ((left >> 32) & _LOW) ^ d ^ key_high, left & _LOW
        key_low, key_high = (key_low + 0x9E3779B9) & _LOW, (key_high + 0xBB67AE85) & _LOW
    bits = ((b << 21) | (a >> 11)) & ((1 << 53) - 1)
    return bits.double() * 2.0**-53


def allowed_only(logits: Tensor, rows: Tensor, bits: Tensor) -> Tensor:
    """A copy of `logits [all rows, vocab]`, with minus infinity for the tokens that masks do not allow.

    Args:
        rows: `[rows]` int64, the rows that have a mask.
        bits: `[rows, words]` int32: bit i of word i // 32 allows token i.
    """
    places = torch.arange(32, dtype=torch.int32, device=bits.device)
    allowed = ((bits[:, :, None] >> places) & 1).view(len(bits), -1)[:, : logits.shape[1]].bool()
    return logits.index_copy(0, rows, logits.index_select(0, rows).masked_fill(~allowed, -torch.inf))
