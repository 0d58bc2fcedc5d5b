"""The contract of `compute/kernels/interface.py` for the CPU: bfloat16 and float32."""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from slotwise.compute.kernels.cpu import (
    attention,
    convolution,
    delta,
    latent,
    pointwise,
    processor,
    sampling_filters,
    state_space,
)
from slotwise.compute.kernels.cpu.cache import CpuCache, head_block_elements, latent_columns, padded
from slotwise.compute.kernels.cpu.jit.compiler import CompiledKernel, compile_all, compile_here
from slotwise.compute.kernels.cpu.launcher import PROGRAM, Arena, GraphRecorder, KernelGraph, KernelLauncher
from slotwise.compute.kernels.cpu.memory import keep_freed
from slotwise.compute.kernels.cpu.products import experts, gemm, onednn, paths, quantize
from slotwise.compute.kernels.cpu.products.linear import PackedPart
from slotwise.compute.kernels.cpu.products.low_rank import CpuAdapters
from slotwise.compute.kernels.cpu.products.packing import Packing
from slotwise.compute.kernels.cpu.reading import READ
from slotwise.compute.kernels.cpu.rotary import ROTARY_STORE, SQUARES_OF
from slotwise.compute.kernels.cpu.threads import RUN_SHARED, WORK
from slotwise.compute.kernels.interface import (
    ACTIVATIONS,
    Activation,
    AttentionShape,
    ClampedSwiGLU,
    ConvolutionShape,
    ConvolutionWeights,
    DeltaShape,
    DeltaWeights,
    ExpertActivation,
    ExpertWeights,
    LatentNorm,
    LatentShape,
    LayerNormWeights,
    LayerShape,
    Linear,
    Mixture,
    PlainActivation,
    QKNorm,
    RaggedBatch,
    Routing,
    SelectiveInputs,
    SelectiveShape,
    SelectiveWeights,
    StateShape,
    StateSpaceShape,
    StateSpaceWeights,
    activated,
    cache_kind,
    in_two_steps,
)
from slotwise.compute.kernels.matrix import Format, QuantizedMatrix, Weight

LOG2_E = math.log2(math.e)
# Elements that one thread computes before two have synchronized.
SMALL = 1 << 13
# How much longer a stored element takes than another: each of a key lies in a cache line of its own.
STORED = 4
# The most tokens of a recorded step: in larger steps the cost of starting kernels is negligible.
MAX_RECORDED = 128
# Tokens of context of the smallest graph; each larger one has twice as many.
SHORTEST = 256


class CpuKernels:
    """Numba kernels and packed products.  One caller at a time."""

    name = "cpu"
    device = torch.device("cpu")
    kinds: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float32)
    records_drafts = True
    mixture_refusal = adapter_refusal = state_refusal = ""

    def __init__(
        self, threads: int | None = None, quantization: str = "none", kv_cache_dtype: str = "auto",
        path: str | None = None,
    ) -> None:
        """`threads` are those of the pool; None: as many as torch uses.  `path` is one of `paths.ALL`; None: see
        `paths.py`.

        Raises:
            ValueError: `quantization` is neither "none" nor in `quantize.FORMATS`; `kv_cache_dtype` is neither "auto"
                nor "int8"; or the forced path is unknown or cannot run here.
        """
        if quantization != "none" and quantization not in quantize.FORMATS:
            raise ValueError(f"quantization must be none, {' or '.join(quantize.FORMATS)}, not {quantization!r}")
        self._cached = cache_kind(kv_cache_dtype, self.name, ("auto", "int8"))
        forced = paths.forced(path)
        self.launcher = KernelLauncher(threads or torch.get_num_threads())
        self.packing = Packing(self.launcher, quantization, forced)
        self._arena = Arena()

    def product_path(self, kind: torch.dtype) -> str:
        """The path of products with weights of `kind`, by its name in `paths.py`."""
        return self.packing.path(kind)

    def warm_up(self, kind: torch.dtype) -> None:
        """Compile or load all kernels of one type, and those of quantized matrices packed so far."""
        stored = self._stored(kind)
        attend, multiply_cache = self._attention(kind, stored)
        of_the_cache = [attend, ROTARY_STORE[kind, stored]]
        multiply = list(dict.fromkeys((gemm.MULTIPLY[kind], multiply_cache)))
        of_logits = [
            sampling_filters.DRAW, sampling_filters.LOG_PROBABILITIES, sampling_filters.GREEDY[torch.float32],
            sampling_filters.MASKED_GREEDY[torch.float32], sampling_filters.MASK,
            sampling_filters.WIDEN[torch.float32]]
        compile_all([*self.packing.kernels(kind), *of_the_cache, *multiply, *of_logits, attention.PLAN,
                     pointwise.EMBED, pointwise.NORM[kind, torch.float32], PROGRAM, WORK, RUN_SHARED, READ])
        compile_here(self.packing.kernels_of_blocks(kind))  # workers do not know these by name
        keep_freed()

    def batch_dependence(self, kind: torch.dtype) -> str:
        """Only oneDNN adds in an order that depends on the number of rows."""
        if self.launcher.is_beside_torch or self.product_path(kind) == "onednn":
            return f"products by oneDNN depend on the number of rows: set {paths.VARIABLE} to another path than onednn"
        return ""

    def operations_per_second(self, kind: torch.dtype) -> float:
        """By the path of products and the number of threads."""
        of_a_thread = {"amx": 7e11, "onednn": 7e11, "fp16": 1.6e11, "bf16": 1.8e11, "amx_int8": 7e11}.get(
            self.product_path(kind), 1e11 if processor.AVX512 else 6e10)
        return of_a_thread * self.launcher.threads

    def refusal(self, shape: AttentionShape | LatentShape) -> str:
        """Soft-capped and biased scores over an int8 cache are refused: its scales would be applied behind.

        Compressed attention needs a cache of the model's own type.
        """
        if isinstance(shape, LatentShape):
            return ("kv_cache_dtype int8 does not support compressed attention on device cpu: choose auto"
                    if self._cached else "")
        if (shape.has_biases or shape.has_relative_biases) and self._cached == torch.int8:
            return "kv_cache_dtype int8 does not support attention scores with biases on device cpu: choose auto"
        if shape.soft_cap and self._cached == torch.int8:
            return "kv_cache_dtype int8 does not support soft-capped attention scores on device cpu: choose auto"
        return ""

    def allocate_cache(self, num_blocks: int, block_size: int, shape: LayerShape, kind: torch.dtype) -> CpuCache:
        """One layer's zeroed cache of `num_blocks` blocks of `block_size` tokens."""
        if isinstance(shape, StateShape):
            return CpuCache.of_states(num_blocks, block_size, shape)
        if isinstance(shape, LatentShape):
            return CpuCache.of_latents(num_blocks, block_size, shape, kind)
        return CpuCache.allocate(num_blocks, block_size, shape, self._stored(kind))

    def cache_bytes_per_block(self, block_size: int, shape: LayerShape, kind: torch.dtype) -> int:
        """Bytes of one block in one layer: keys, values and any scales, or a state."""
        if isinstance(shape, StateShape):
            return shape.state_bytes
        if isinstance(shape, LatentShape):
            return block_size * latent_columns(shape) * kind.itemsize
        stored = self._stored(kind)
        return sum(head_block_elements(block_size, shape.head_dim, stored)) * shape.num_kv_heads * stored.itemsize

    def _stored(self, kind: torch.dtype) -> torch.dtype:
        """The cache's type in a model that computes in `kind`."""
        return self._cached or kind

    def cache_pieces(self, cache: CpuCache) -> tuple[Tensor, ...]:
        """One view, keys and values together."""
        return (cache.storage,)

    def format_refusal(self, format: Format, kind: torch.dtype) -> str:
        """Formats without a layout in `block_layout.py`, and 8-bit floats without a product in `linear_fp8.py`."""
        return self.packing.refusal(format, kind)

    def linear(self, weight: Weight, bias: Tensor | None = None, activation: Activation | None = None) -> Linear:
        """`weight [out, in]`, packed once for many products.  On most paths an activation is part of the product."""
        if activation is None:
            return self.packing.linear(weight, bias)
        product = self.packing.activated(weight, bias, ACTIVATIONS.index(activation))
        return in_two_steps(self, weight, bias, PlainActivation(activation)) if product is None else product

    def gated(self, weight: Weight, bias: Tensor | None = None, activation: Activation = "silu") -> Linear:
        """`weight [2 * intermediate, in]`, gates first.  On most paths SiLU is part of the product."""
        product = self.packing.gated(weight, bias) if activation == "silu" else None
        return in_two_steps(self, weight, bias, activation) if product is None else product

    def head(self, weight: Weight, bias: Tensor | None = None) -> Linear:
        """`weight [vocab, hidden]`, packed for logits in float32, whatever the hidden states are."""
        return self.packing.head(weight, bias)

    def wide_kind(self, kind: torch.dtype) -> torch.dtype:
        """float32: bfloat16 logits from 16 on would be multiples of an eighth, and often equal."""
        return torch.float32

    def convert(self, x: Tensor, kind: torch.dtype) -> Tensor:
        """`x [tokens, size]` as another type, rounded to nearest even."""
        if x.dtype == kind:
            return x
        x = x.contiguous()
        out = self.launcher.empty(x.shape, kind)
        self.launcher.give(x.data_ptr(), 0, 0, out.data_ptr(), *x.shape)
        self._run(pointwise.CONVERT[x.dtype, kind], x.numel())
        return out

    def embedding(self, table: QuantizedMatrix, kind: torch.dtype, scale: float = 1.0) -> Callable[[Tensor], Tensor]:
        """Rows from the panels that a head of the same table reads."""
        return self.packing.embedding(table, kind, scale)

    def exact_linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """`weight [out, in]`, packed without quantizing it."""
        return self.packing.exact(weight, bias)

    def experts(
        self, weights: Iterable[ExpertWeights], routing: Routing, activation: ExpertActivation, ends: Tensor,
    ) -> Mixture:
        """A layer's experts, by `experts.py`."""
        gates: list[Sequence[PackedPart]] = []
        downs: list[Sequence[PackedPart]] = []
        is_gated = False
        for each in weights:
            is_gated = activation == "silu" and self.packing.can_gate(each.gate_up)
            gates.append(self.packing.expert(each.gate_up, each.gate_up_bias, is_gated=is_gated))
            downs.append(self.packing.expert(each.down, each.down_bias))
        activate = None if is_gated else activated(self, activation)
        return experts.CpuMixture(gates, downs, activate, routing, ends, self.launcher)

    def adapters(self, num_places: int, max_rank: int, kind: torch.dtype) -> CpuAdapters:
        """The products of `low_rank.py`."""
        return CpuAdapters(self.launcher, num_places, max_rank, kind, MAX_RECORDED)

    def linear_bytes(self, weight: Weight) -> int:
        """Bytes of a packed `linear`."""
        return self.packing.linear_bytes(weight)

    def head_bytes(self, weight: Weight) -> int:
        """Bytes of a packed `head`."""
        return self.packing.head_bytes(weight)

    def library_bytes(self, kind: torch.dtype) -> int:
        """The size of oneDNN's cache, where oneDNN multiplies."""
        return onednn.cache_bytes() if self.product_path(kind) == "onednn" else 0

    def graph_size(self, tokens: int, context: int) -> tuple[int, int]:
        """Exactly `tokens`: another graph costs less than computing padding."""
        return tokens if tokens <= MAX_RECORDED else 0, max(SHORTEST, 1 << (context - 1).bit_length())

    def record(self, work: Callable[[], Tensor]) -> KernelGraph | None:
        """Run `work`, which calls these kernels alone, and capture it.

        Returns None without running `work` on the path `onednn`: there torch computes the products, and a graph holds
        only our own kernels.
        """
        return None if self.launcher.is_beside_torch else GraphRecorder(self.launcher, self._arena).record(work)

    def rowwise(self, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """`function(*inputs)`, which a graph calls again."""
        return self.launcher.call(function, inputs)

    def embed(self, table: Tensor, token_ids: Tensor, first: int | None = None) -> Tensor:
        """Rows of `table [vocabulary, hidden]`: `[tokens, hidden]`.  Ids outside the table are clamped."""
        tokens, size = len(token_ids), table.shape[1]
        out = self.launcher.empty((tokens, size), table.dtype)
        self.launcher.give(table.data_ptr(), token_ids.data_ptr(), out.data_ptr(), tokens, size * table.itemsize,
                           len(table) - 1, 0 if first is None else first, int(first is not None))
        self._run(pointwise.EMBED, tokens * size)
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        """RMSNorm over the last dimension of `x [tokens, hidden]`."""
        return self._norm(x, None, weight, eps, offset)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        """`residual += x` in place, then RMSNorm of the sum as stored: `[tokens, hidden]`."""
        return self._norm(x, residual, weight, eps, offset)

    def _norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, offset: float) -> Tensor:
        x = x.contiguous()
        tokens, size = x.shape
        out = self.launcher.empty((tokens, size), weight.dtype)
        stream = x if residual is None else residual
        self.launcher.give(x.data_ptr(), 0 if residual is None else residual.data_ptr(), weight.data_ptr(),
                           out.data_ptr(), tokens, size, _bits(eps), _bits(offset), 0, self.launcher.threads)
        self._run(pointwise.NORM[weight.dtype, stream.dtype], x.numel())
        return out

    def layer_norm(self, x: Tensor, norm: LayerNormWeights, residual: Tensor | None = None) -> Tensor:
        """LayerNorm of `x [tokens, hidden]`, or of `residual += x`, in place, as stored."""
        x = x.contiguous()
        given = norm.weight if norm.weight is not None else norm.bias
        kind, stream = x.dtype if given is None else given.dtype, x if residual is None else residual
        out = self.launcher.empty(x.shape, kind)
        residual_at, weight_at, bias_at = (0 if part is None else part.data_ptr()
                                           for part in (residual, norm.weight, norm.bias))
        self.launcher.give(x.data_ptr(), residual_at, weight_at, out.data_ptr(), *x.shape, _bits(norm.eps),
                           _bits(norm.offset), bias_at, self.launcher.threads)
        self._run(pointwise.LAYER_NORM[kind, stream.dtype], x.numel())
        return out

    def add(self, x: Tensor, residual: Tensor, gate: Tensor | None = None) -> Tensor:
        """`residual += x` in place, or `residual += sigmoid(gate) * x`; returns `residual`."""
        x = x.contiguous()
        gate_at = 0 if gate is None else gate.data_ptr()
        self.launcher.give(
            x.data_ptr(), residual.data_ptr(), gate_at, 0, *x.shape, 0, 0, 0, self.launcher.threads)
        self._run(pointwise.ADD[x.dtype, residual.dtype], x.numel())
        return residual

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """`silu(gate) * up` for `gate_up [tokens, 2 * intermediate]`."""
        return self._mapped(pointwise.SILU_MUL, gate_up, 2)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        """`gelu(gate) * up`, with GELU's approximation by tanh."""
        return self._mapped(pointwise.GELU_MUL, gate_up, 2)

    def _mapped(
        self, codes: dict[torch.dtype, CompiledKernel], x: Tensor, parts: int, *options: int, weight_at: int = 0,
    ) -> Tensor:
        x = x.contiguous()
        tokens, size = x.shape[0], x.shape[1] // parts
        out = self.launcher.empty((tokens, size), x.dtype)
        self.launcher.give(x.data_ptr(), 0, weight_at, out.data_ptr(), tokens, size, *options)
        self._run(codes[x.dtype], x.numel())
        return out

    def sigmoid_mul(self, gate: Tensor, x: Tensor) -> Tensor:
        """`sigmoid(gate) * x`."""
        return self._mapped(pointwise.SIGMOID_MUL, x, 1, weight_at=(gate := gate.contiguous()).data_ptr())

    def gated_convolution(
        self, bcx: Tensor, weights: ConvolutionWeights, cache: CpuCache, batch: RaggedBatch, shape: ConvolutionShape,
    ) -> Tensor:
        """By `convolution.py`."""
        return convolution.gated_convolution(self.launcher, bcx, weights, cache, batch, shape)

    def silu_convolution(
        self, x: Tensor, weights: ConvolutionWeights, cache: CpuCache, batch: RaggedBatch, shape: SelectiveShape,
    ) -> Tensor:
        """By `convolution.py`."""
        return convolution.convolve(self.launcher, x, weights, cache, batch, shape, x.dtype)

    def selective_scan(
        self, inputs: SelectiveInputs, weights: SelectiveWeights, cache: CpuCache, batch: RaggedBatch,
        shape: SelectiveShape,
    ) -> Tensor:
        """By `state_space.py`."""
        return state_space.selective_scan(self.launcher, inputs, weights, cache, batch, shape)

    def state_space(
        self, mixed: Tensor, weights: StateSpaceWeights, cache: CpuCache, batch: RaggedBatch, shape: StateSpaceShape,
    ) -> Tensor:
        """By `state_space.py`."""
        bits = _bits(shape.least_step), _bits(shape.largest_step), _bits(weights.eps)
        return state_space.state_space(self.launcher, mixed, weights, cache, batch, shape, bits)

    def gated_delta(
        self, mixed: Tensor, gates: Tensor, weights: DeltaWeights, cache: CpuCache, batch: RaggedBatch,
        shape: DeltaShape,
    ) -> Tensor:
        """By `delta.py`."""
        bits = _bits(weights.eps), _bits(shape.beta_scale), _bits(float(shape.is_gated_by_sigmoid))
        return delta.gated_delta(self.launcher, mixed, gates, weights, cache, batch, shape, bits)

    def activate(self, x: Tensor, activation: Activation, *, is_gated: bool = False) -> Tensor:
        """`activation(x)`, or `activation(gate) * up`."""
        return self._mapped(pointwise.ACTIVATE, x, 2 if is_gated else 1, ACTIVATIONS.index(activation), int(is_gated))

    def clamped_swiglu(self, gate_up: Tensor, activation: ClampedSwiGLU) -> Tensor:
        """`(clamp(up) + 1) * g * sigmoid(alpha * g)`, with `g = min(gate, limit)`."""
        return self._mapped(pointwise.CLAMPED_SWIGLU, gate_up, 2, _bits(activation.alpha), _bits(activation.limit))

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        """`cap * tanh(x / cap)` for `x [tokens, size]`; NaN and infinities stay what they are."""
        return self._mapped(pointwise.SOFT_CAP, x, 1, _bits(cap))

    def rotary_store(
        self, qkv: Tensor, rotary: Tensor, batch: RaggedBatch, cache: CpuCache, shape: AttentionShape,
        norm: QKNorm | None,
    ) -> Tensor:
        """Split, norm and rotate; keys and values go to `batch.slot_mapping`; queries `[tokens, heads, head_dim]`."""
        qkv = qkv.contiguous()
        tokens = qkv.shape[0]
        query = self.launcher.empty((tokens, shape.num_heads, shape.head_dim), qkv.dtype)
        norms = (0, 0, 0, 0, 1, 1) if norm is None else (
            norm.query.data_ptr(), norm.key.data_ptr(), _bits(norm.eps), _bits(norm.offset),
            len(norm.query) // shape.head_dim, len(norm.key) // shape.head_dim)
        given = (
            qkv.data_ptr(), query.data_ptr(), cache.address, rotary.data_ptr(), batch.positions.data_ptr(),
            batch.slot_mapping.data_ptr(), tokens, shape.num_heads // shape.num_kv_heads, *cache.geometry[1:], *norms,
            self.launcher.scratch(self.launcher.threads * padded(shape.head_dim)))
        squares, numbers = 0, (0, 0)
        if norm is not None and norm.shared is not None:
            of_rank, numbers = self.launcher.empty((tokens, 2), torch.float32), norm.shared.numbers
            self.launcher.give(*given, of_rank.data_ptr(), *numbers)
            self._run(SQUARES_OF[qkv.dtype], qkv.numel())
            of_all = norm.shared.add_up(of_rank)
            squares = of_all.data_ptr()
        self.launcher.give(*given, squares, *numbers, self.launcher.threads)
        self._run(ROTARY_STORE[qkv.dtype, cache.storage.dtype], STORED * qkv.numel())
        return query

    def attention(
        self, query: Tensor, cache: CpuCache, batch: RaggedBatch, shape: AttentionShape, sinks: Tensor | None = None,
        biases: Tensor | None = None,
    ) -> Tensor:
        """Attention of every row over its own cached context: `[tokens, heads * head_dim]`."""
        tokens, rows, tables = query.shape[0], batch.context_lens.shape[0], batch.block_tables
        launcher, out = self.launcher, self.launcher.empty((tokens, shape.num_heads * shape.head_dim), query.dtype)
        heads = attention.heads_together(shape, rows, tokens, launcher.threads)
        workspace = attention.workspace(shape, rows, tokens, batch.max_context_len, heads)
        base = launcher.scratch(workspace.floats(launcher.threads))
        attend, multiply = self._attention(query.dtype, cache.storage.dtype)
        launcher.give(
            multiply.address, query.data_ptr(), out.data_ptr(), cache.address,
            tables.data_ptr(), tables.stride(0), batch.query_starts.data_ptr(), batch.context_lens.data_ptr(), rows,
            base, base + workspace.arrivals, base + workspace.parts, base + workspace.threads, workspace.thread_bytes,
            shape.num_heads // shape.num_kv_heads, *cache.geometry[1:],  # layers with other queries share a cache
            shape.span, _bits(shape.scale * LOG2_E), launcher.threads,
            attention.tile_tokens(shape.num_heads // shape.num_kv_heads, heads=heads), _bits(shape.soft_cap * LOG2_E),
            0 if sinks is None else sinks.data_ptr(), shape.ahead, *(
                (0, 0, 0) if biases is None else (
                    biases.data_ptr() + shape.has_relative_biases * (biases.shape[1] // 2) * biases.itemsize,
                    biases.shape[1], int(shape.has_relative_biases))), heads,
        )
        launcher.alone(attention.PLAN)
        launcher.together(attend)
        return out

    def latent_products(self, key_up: Tensor, value_up: Tensor) -> tuple[latent.HeadWeights, latent.HeadWeights]:
        """Panels for queries times `key_up`, and for latents times `value_up`."""
        return latent.pack(key_up.transpose(1, 2), self.launcher), latent.pack(value_up, self.launcher)

    def latent_store(
        self, query: Tensor, compressed: Tensor, rotary: Tensor, batch: RaggedBatch, cache: CpuCache,
        shape: LatentShape, norm: LatentNorm,
    ) -> Tensor:
        """Latents, normed, and keys, rotated, to the cache; the rotary part of queries is rotated in place."""
        self.launcher.give(
            query.data_ptr(), compressed.data_ptr(), cache.address, rotary.data_ptr(), batch.positions.data_ptr(),
            batch.slot_mapping.data_ptr(), len(query), shape.num_heads, shape.nope_dim, shape.rope_dim, shape.rank,
            cache.block_size, cache.block_bytes, norm.weight.data_ptr(), _bits(norm.eps), int(shape.has_neighbors))
        self._run(latent.STORE[query.dtype], query.numel())
        return query

    def latent_attention(
        self, query: Tensor, cache: CpuCache, batch: RaggedBatch, shape: LatentShape,
        products: tuple[latent.HeadWeights, latent.HeadWeights],
    ) -> Tensor:
        """Queries of every head over the latents, and both absorbed products."""
        kind, launcher = query.dtype, self.launcher
        tokens, rows, tables = len(query), len(batch.context_lens), batch.block_tables
        has_pairs = kind == torch.bfloat16 and self._multiplies_pairs
        key_up, value_up = products
        absorbed = latent.multiply(launcher, query, key_up, shape.rope_dim, has_pairs=has_pairs)
        found = launcher.empty((tokens, shape.num_heads * shape.rank), kind)
        parts = latent.parts_of_heads(shape, rows, tokens, batch.max_context_len, launcher.threads)
        workspace = latent.workspace(shape, rows, tokens, batch.max_context_len, parts)
        base = launcher.scratch(workspace.floats(launcher.threads))
        attend, of_values, of_scores = latent.kernels(kind, has_pairs=has_pairs)
        group, (_, _, *sizes, block_bytes) = shape.num_heads // parts, cache.geometry
        launcher.give(
            of_values.address, absorbed.data_ptr(), found.data_ptr(), cache.address, tables.data_ptr(),
            tables.stride(0), batch.query_starts.data_ptr(), batch.context_lens.data_ptr(), rows, base,
            base + workspace.arrivals, base + workspace.parts, base + workspace.threads, workspace.thread_bytes,
            group, parts, *sizes, block_bytes // parts, 0, _bits(shape.scale * LOG2_E), launcher.threads,
            attention.tile_tokens(group, latent.TILE_ROWS, parts), *[0] * len(attention.OPTIONS),
            of_scores.address, latent_columns(shape), shape.rope_dim)
        launcher.alone(attention.PLAN)
        launcher.together(attend)
        return latent.multiply(launcher, found, value_up, 0, has_pairs=has_pairs)

    @functools.cached_property
    def _multiplies_pairs(self) -> bool:
        return gemm.pairs_pay()

    def _attention(self, kind: torch.dtype, stored: torch.dtype) -> tuple[CompiledKernel, CompiledKernel]:
        """The kernel for queries of `kind` over a cache that is `stored`, and the product that it calls."""
        if stored == torch.bfloat16 and self._multiplies_pairs:
            return attention.ATTEND_PAIRS, gemm.MULTIPLY_PAIRS
        return attention.ATTEND[kind, stored], gemm.MULTIPLY[stored]

    def _run(self, code: CompiledKernel, elements: int) -> None:
        if elements < SMALL:
            self.launcher.alone(code)
        else:
            self.launcher.together(code)


@functools.lru_cache(maxsize=256)
def _bits(value: float) -> int:
    """The 32 bits of `value` as float32."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    return int(bits)
