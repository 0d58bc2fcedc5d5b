"""The contract of `compute/kernels/interface.py` for NVIDIA GPUs: bfloat16, float16 and float32."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from slotwise.compute.kernels.cuda import attention, configs, experts, graphs, latent, narrow, packed, pointwise
from slotwise.compute.kernels.cuda.attention import CudaCache, bytes_per_block
from slotwise.compute.kernels.cuda.jit import INTERPRETED
from slotwise.compute.kernels.cuda.latent import CudaLatentCache, LatentProducts
from slotwise.compute.kernels.cuda.low_rank import CudaAdapters
from slotwise.compute.kernels.cuda.rotary import rotary_store
from slotwise.compute.kernels.group import embed_part
from slotwise.compute.kernels.interface import (
    Activation,
    AdapterProducts,
    AttentionShape,
    ClampedSwiGLU,
    ConvolutionShape,
    ConvolutionWeights,
    DeltaShape,
    DeltaWeights,
    ExpertActivation,
    ExpertWeights,
    Graph,
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
from slotwise.compute.kernels.matrix import Format, QuantizedMatrix, StackedMatrix, Weight
from slotwise.compute.kernels.reference import as_bytes

# 16-bit operations a second, by major compute capability, and the share of that rate in float32, without tensor cores.
_DENSE_RATES = {8: 2.5e14, 9: 8e14, 10: 1.8e15}
_FLOAT32_SHARE = 1 / 16
# The first compute capability with conversions to fp8 and back.
FP8_SINCE = 8, 9


class CudaKernels:
    """Triton kernels and cuBLAS products.  Calls only enqueue work, and do not wait for the device."""

    name = "cuda"
    kinds: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16, torch.float32)
    mixture_refusal = adapter_refusal = ""
    state_refusal = "layers with a recurrent state are not supported on device cuda: choose device cpu"
    records_drafts = True

    def __init__(self, device: str = "cuda", kv_cache_dtype: str = "auto") -> None:
        """`device` is a CUDA device, or "cpu" under Triton's interpreter.

        Raises:
            ValueError: `device` is "cpu" and Triton was imported without its interpreter; `kv_cache_dtype` is neither
                "auto" nor "fp8", or the device has no fp8.
        """
        self._cached = cache_kind(kv_cache_dtype, self.name, ("auto", "fp8"))
        self.device = torch.device(device)
        if self.device.type == "cpu" and not INTERPRETED:
            raise ValueError("these kernels run on the CPU only with TRITON_INTERPRET=1, set before Triton is imported")
        on_gpu = self.device.type == "cuda"
        if self._cached and on_gpu and torch.cuda.get_device_capability(self.device) < FP8_SINCE:
            raise ValueError(f"kv_cache_dtype {kv_cache_dtype} needs a GPU of compute capability 8.9 or later: "
                             "choose auto")
        self._device_name = torch.cuda.get_device_name(self.device) if on_gpu else "interpreter"
        major, minor = torch.cuda.get_device_capability(self.device) if on_gpu else (8, 0)
        self._capability = 10 * major + minor
        self._graphs = graphs.CudaGraphs(self.device) if on_gpu else None
        self._packed: weakref.WeakKeyDictionary[QuantizedMatrix, packed.PackedMatrix] = weakref.WeakKeyDictionary()

    def warm_up(self, kind: torch.dtype) -> None:
        """Nothing: kernels are compiled, or read from Triton's cache on disk, at the first use of a layer's shape."""

    def product_path(self, kind: torch.dtype) -> str:
        """Always cuBLAS: the path of weights that are not quantized."""
        return "cublas"

    def batch_dependence(self, kind: torch.dtype) -> str:
        """cuBLAS chooses its kernels by the number of rows."""
        return "on device cuda products by cuBLAS depend on the number of rows: choose device cpu"

    def operations_per_second(self, kind: torch.dtype) -> float:
        """By the compute capability of the device."""
        if self.device.type != "cuda":
            return float("inf")
        rate = _DENSE_RATES.get(torch.cuda.get_device_capability(self.device)[0], 1e14)
        return rate * _FLOAT32_SHARE if kind == torch.float32 else rate

    def refusal(self, shape: AttentionShape | LatentShape) -> str:
        """Biases by the distance of query and key are refused."""
        if isinstance(shape, AttentionShape) and shape.has_relative_biases:
            return "device cuda does not support biases by the distance of query and key: choose device cpu"
        return ""

    def allocate_cache(
        self, num_blocks: int, block_size: int, shape: LayerShape, kind: torch.dtype,
    ) -> CudaCache | CudaLatentCache:
        """One layer's zeroed cache of `num_blocks` blocks of `block_size` tokens."""
        if isinstance(shape, LatentShape):
            return CudaLatentCache.allocate(num_blocks, block_size, shape, self._cached or kind, self.device)
        return CudaCache.allocate(num_blocks, block_size, self._attention(shape), self._cached or kind, self.device)

    def cache_bytes_per_block(self, block_size: int, shape: LayerShape, kind: torch.dtype) -> int:
        """Bytes one block takes in one layer, keys and values together."""
        if isinstance(shape, LatentShape):
            return block_size * shape.width * (self._cached or kind).itemsize
        return bytes_per_block(block_size, self._attention(shape), self._cached or kind)

    def _attention(self, shape: LayerShape) -> AttentionShape:
        if isinstance(shape, StateShape):
            raise ValueError(self.state_refusal)
        assert isinstance(shape, AttentionShape)
        return shape

    def cache_pieces(self, cache: CudaCache | CudaLatentCache) -> tuple[Tensor, ...]:
        """One view, keys and values together."""
        return (as_bytes(cache.storage),)

    def format_refusal(self, format: Format, kind: torch.dtype) -> str:
        """Formats whose groups would be cut by every chunk that tensor cores multiply are refused."""
        return packed.refusal(format)

    def linear(self, weight: Weight, bias: Tensor | None = None, activation: Activation | None = None) -> Linear:
        """A product over the last dimension, by cuBLAS, or with quantized weights by `packed.py` or `narrow.py`.

        Raises:
            ValueError: the format is refused.
        """
        if activation is not None:
            return in_two_steps(self, weight, bias, PlainActivation(activation))
        if isinstance(weight, QuantizedMatrix) and narrow.is_narrow(weight.format, self._capability):
            narrowed = narrow.pack(weight, self.device)
            return lambda x: narrow.multiply(x, narrowed, bias)
        return self._exact(weight, bias, self.linear)

    def _exact(
        self, weight: Weight, bias: Tensor | None, multiply: Callable[[Weight, Tensor | None], Linear],
    ) -> Linear:
        """A product whose tokens are not quantized; `multiply` makes each product of a weight of several formats."""
        if isinstance(weight, Tensor):
            return lambda x: F.linear(x, weight, bias)
        if isinstance(weight, QuantizedMatrix):
            matrix = self._pack(weight)
            return lambda x: packed.multiply(x, matrix, bias)
        sizes = [part.outputs for part in weight.parts]
        biases = [None] * len(sizes) if bias is None else bias.split(sizes)
        products = [multiply(part, own) for part, own in zip(weight.parts, biases, strict=True)]
        return lambda x: torch.cat([product(x) for product in products], dim=1)

    def _pack(self, matrix: QuantizedMatrix) -> packed.PackedMatrix:
        """The matrix on the device, shared by its table and its head.

        Raises:
            ValueError: the format is refused.
        """
        found = self._packed.get(matrix)
        if found is None:
            found = self._packed[matrix] = packed.pack(matrix, self.device)
        return found

    def gated(self, weight: Weight, bias: Tensor | None = None, activation: Activation = "silu") -> Linear:
        """A product, then its activation."""
        return in_two_steps(self, weight, bias, activation)

    def exact_linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """A product like any other."""
        return self.linear(weight, bias)

    def experts(
        self, weights: Iterable[ExpertWeights], routing: Routing, activation: ExpertActivation, ends: Tensor,
    ) -> Mixture:
        """Products of all experts in one launch each (`experts.py`)."""
        stacked, activate = experts.stack(weights, len(routing.experts), self.device), activated(self, activation)
        return lambda x, logits: experts.mixture(x, logits, stacked, routing, ends, activate)

    def adapters(self, num_places: int, max_rank: int, kind: torch.dtype) -> AdapterProducts:
        """By the grouped products of experts (`low_rank.py`)."""
        return CudaAdapters(num_places, max_rank, kind, self.device)

    def wide_kind(self, kind: torch.dtype) -> torch.dtype:
        """That of the hidden states."""
        return kind

    def convert(self, x: Tensor, kind: torch.dtype) -> Tensor:
        """`x` as another type; `x` itself where it has that type."""
        return x.to(kind)

    def head(self, weight: Weight, bias: Tensor | None = None) -> Linear:
        """A product whose tokens are never quantized; a table of the same matrix shares its memory."""
        return self._exact(weight, bias, self.head)

    def embedding(self, table: QuantizedMatrix, kind: torch.dtype, scale: float = 1.0) -> Callable[[Tensor], Tensor]:
        """Rows of a packed table, dequantized as they are read."""
        matrix = self._pack(table)
        return lambda token_ids: packed.rows_of(matrix, token_ids, kind, scale)

    def linear_bytes(self, weight: Weight) -> int:
        """Bytes of a weight as `linear` packs it."""
        if isinstance(weight, QuantizedMatrix) and narrow.is_narrow(weight.format, self._capability):
            return narrow.narrow_bytes(weight.outputs, weight.depth)
        if isinstance(weight, StackedMatrix):
            return sum(map(self.linear_bytes, weight.parts))
        return self.head_bytes(weight)

    def head_bytes(self, weight: Weight) -> int:
        """Bytes of a weight as `head` packs it."""
        if isinstance(weight, Tensor):
            return weight.numel() * weight.itemsize
        if isinstance(weight, StackedMatrix):
            return sum(map(self.head_bytes, weight.parts))
        return packed.packed_bytes(weight.format, weight.outputs, weight.depth)

    def library_bytes(self, kind: torch.dtype) -> int:
        """0: cuBLAS keeps no host memory that is known."""
        return 0

    def graph_size(self, tokens: int, context: int) -> tuple[int, int]:
        """One of a few sizes; padding rows fill the step up to it."""
        return graphs.capture_size(tokens, context)

    def record(self, work: Callable[[], Tensor]) -> Graph | None:
        """Run `work`, then capture it; None where that is not possible."""
        return self._graphs.record(work) if self._graphs else None

    def rowwise(self, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """`function(*inputs)`; a CUDA graph captures torch's own kernels, too."""
        return function(*inputs)

    def embed(self, table: Tensor, token_ids: Tensor, first: int | None = None) -> Tensor:
        """Rows of `table [vocabulary, hidden]`: `[tokens, hidden]`."""
        return table.index_select(0, token_ids) if first is None else embed_part(table, token_ids - first)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        """RMSNorm over the last dimension of `x [tokens, hidden]`."""
        return pointwise.rms_norm(x, weight, eps, offset)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        """`residual += x` in place, then RMSNorm of the sum as stored: `[tokens, hidden]`."""
        return pointwise.add_rms_norm(x, residual, weight, eps, offset)

    def layer_norm(self, x: Tensor, norm: LayerNormWeights, residual: Tensor | None = None) -> Tensor:
        """LayerNorm of `x [tokens, hidden]`, or of `residual += x`, in place, as stored."""
        return pointwise.layer_norm(x, norm, residual)

    def add(self, x: Tensor, residual: Tensor, gate: Tensor | None = None) -> Tensor:
        """`residual += x` in place, or `residual += sigmoid(gate) * x`; returns `residual`."""
        if gate is None:
            return residual.add_(x)
        return residual.copy_(residual.float() + gate.float().sigmoid() * x.float())

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """`silu(gate) * up` for `gate_up [tokens, 2 * intermediate]`."""
        return pointwise.activated(gate_up, "silu", is_gated=True)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        """`gelu(gate) * up`, with GELU's approximation by tanh."""
        return pointwise.activated(gate_up, "gelu_tanh", is_gated=True)

    def sigmoid_mul(self, gate: Tensor, x: Tensor) -> Tensor:
        """`sigmoid(gate) * x`."""
        return (gate.float().sigmoid() * x.float()).to(x.dtype)

    def gated_convolution(
        self, bcx: Tensor, weights: ConvolutionWeights, cache: CudaCache, batch: RaggedBatch, shape: ConvolutionShape,
    ) -> Tensor:
        """Raises ValueError: `state_refusal`."""
        raise ValueError(self.state_refusal)

    def silu_convolution(
        self, x: Tensor, weights: ConvolutionWeights, cache: CudaCache, batch: RaggedBatch, shape: SelectiveShape,
    ) -> Tensor:
        """Raises ValueError: `state_refusal`."""
        raise ValueError(self.state_refusal)

    def selective_scan(
        self, inputs: SelectiveInputs, weights: SelectiveWeights, cache: CudaCache, batch: RaggedBatch,
        shape: SelectiveShape,
    ) -> Tensor:
        """Raises ValueError: `state_refusal`."""
        raise ValueError(self.state_refusal)

    def state_space(
        self, mixed: Tensor, weights: StateSpaceWeights, cache: CudaCache, batch: RaggedBatch, shape: StateSpaceShape,
    ) -> Tensor:
        """Raises ValueError: `state_refusal`."""
        raise ValueError(self.state_refusal)

    def gated_delta(
        self, mixed: Tensor, gates: Tensor, weights: DeltaWeights, cache: CudaCache, batch: RaggedBatch,
        shape: DeltaShape,
    ) -> Tensor:
        """Raises ValueError: `state_refusal`."""
        raise ValueError(self.state_refusal)

    def latent_products(self, key_up: Tensor, value_up: Tensor) -> LatentProducts:
        """Both weights as torch multiplies them."""
        return LatentProducts(key_up.contiguous(), value_up.transpose(1, 2).contiguous())

    def latent_store(
        self, query: Tensor, compressed: Tensor, rotary: Tensor, batch: RaggedBatch, cache: CudaLatentCache,
        shape: LatentShape, norm: LatentNorm,
    ) -> Tensor:
        """Latents, normed, and keys, rotated, to the cache; the rotary part of queries is rotated in place."""
        return latent.store(query, compressed, rotary, batch, cache, shape, norm)

    def latent_attention(
        self, query: Tensor, cache: CudaLatentCache, batch: RaggedBatch, shape: LatentShape, products: LatentProducts,
    ) -> Tensor:
        """Queries of every head over the latents, between the absorbed products, by cuBLAS."""
        return latent.attend(query, cache, batch, shape, products, self._capability)

    def activate(self, x: Tensor, activation: Activation, *, is_gated: bool = False) -> Tensor:
        """`activation(x)`, or `activation(gate) * up`."""
        return pointwise.activated(x, activation, is_gated=is_gated)

    def clamped_swiglu(self, gate_up: Tensor, activation: ClampedSwiGLU) -> Tensor:
        """`(clamp(up) + 1) * g * sigmoid(alpha * g)`, with `g = min(gate, limit)`."""
        gate, up = gate_up.float().chunk(2, dim=-1)
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
        return ((up + 1) * gate * torch.sigmoid(activation.alpha * gate)).to(gate_up.dtype)

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        """`cap * tanh(x / cap)`; NaN and infinities stay what they are."""
        return torch.where(x.isfinite(), (cap * torch.tanh(x.float() / cap)).to(x.dtype), x)

    def rotary_store(
        self, qkv: Tensor, rotary: Tensor, batch: RaggedBatch, cache: CudaCache, shape: AttentionShape,
        norm: QKNorm | None,
    ) -> Tensor:
        """Split, norm and rotate; keys and values go to `batch.slot_mapping`; queries `[tokens, heads, head_dim]`."""
        return rotary_store(qkv, rotary, batch, cache, shape, norm)

    def attention(
        self, query: Tensor, cache: CudaCache, batch: RaggedBatch, shape: AttentionShape, sinks: Tensor | None = None,
        biases: Tensor | None = None,
    ) -> Tensor:
        """Attention of every row over its own cached context: `[tokens, heads * head_dim]`."""
        tuning = configs.tuning_for(self._device_name, shape.head_dim, query.dtype, self._capability)
        return attention.attend(query, cache, batch, shape, tuning, sinks, biases)
