"""The launches whose kernels are compiled: every configuration that a default can choose, by the code that starts it.

A launch is one step of a layer or of the sampler, on tensors of the CPU whose sizes decide which kernel is compiled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from slotwise.compute.kernels.cuda import attention, experts, latent, narrow, packed, pointwise, rotary, sampling
from slotwise.compute.kernels.cuda.attention import CudaCache
from slotwise.compute.kernels.cuda.configs import (
    FEW,
    codes_tile,
    default_tuning,
    expert_codes_tile,
    experts_tile,
    narrow_tile,
)
from slotwise.compute.kernels.cuda.experts import ExpertCodes
from slotwise.compute.kernels.cuda.low_rank import CudaAdapters
from slotwise.compute.kernels.interface import (
    ACTIVATIONS,
    AttentionShape,
    LatentNorm,
    LatentShape,
    LayerNormWeights,
    QKNorm,
    RaggedBatch,
    Routing,
)
from slotwise.compute.kernels.matrix import E4M3, Factors, Format
from slotwise.compute.model.gguf.block_types import BLOCK_TYPES
from slotwise.compute.model.quantization.bitsandbytes import NF4

KINDS = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
HEAD_DIMS = (32, 64, 80, 96, 128, 192, 256)
HEADS, KV_HEADS, TOKENS, BLOCK_SIZE = 8, 2, 40, 16
OPTIONS = {  # of attention: window, soft cap, sinks
    "plain": (0, 0.0, False), "window, cap": (64, 50.0, False), "window, sinks": (64, 0.0, True)}
LATENTS = (512, 64), (256, 32)  # of DeepSeek-V2 and of MiniCPM3: latent and rotary key
HIDDEN = (576, 4096)
VOCABULARIES = (50_000, 151_936)
FP8_SINCE = 89  # compute capability
FEW_AND_MANY = FEW, 8 * FEW  # tokens, or pairs of an expert
OUTPUTS, WIDE, DEPTH = 4096, 32_768, 14_336  # of products: those of few tokens are split along their depth, or whole
MIXTURE = Routing(8, 2, is_normalized=True), 512, 768  # hidden and intermediate size
FORMATS = {name: kind.format for name, kind in BLOCK_TYPES.items()} | {
    "GPTQ": Format(4, 128, torch.float16, zero=8), "GPTQ, 8 bits": Format(8, 128, torch.float16, zero=128),
    "AWQ": Format(4, 128, torch.float32, has_minimums=True), "NF4": Format(4, 64, torch.float32, levels=NF4),
    "FP8 of blocks": Format(8, 128, torch.float32, levels=E4M3), "FP8": Format(8, 0, torch.float32, levels=E4M3),
    "int8": Format(8, 0, torch.float32, zero=128)}
OF_EXPERTS = "GPTQ", "Q4_K", "Q6_K", "MXFP4"
IN_ALL_TYPES = "GPTQ", "Q4_K"  # of other formats products in bfloat16 are compiled


class Launch(NamedTuple):
    """Work whose launches are compiled, and what distinguishes it in the table."""

    of: str
    kind: str
    work: Callable[[], Any]
    claims: Mapping[str, int] = {}  # programs at once on a multiprocessor, by kernel; of others 1


def launches(capability: int) -> Iterator[Launch]:
    """All of one compute capability."""
    for kind in KINDS:
        for head_dim in HEAD_DIMS:
            for options in OPTIONS:
                yield _attention(kind, head_dim, options, capability)
            yield _rotary(kind, head_dim)
        for rank, rope_dim in LATENTS:
            yield _latent(kind, rank, rope_dim, capability)
        yield from _others(kind)
        yield from _experts(kind)
        yield from _adapters(kind)
        if kind == "bfloat16":
            for name in OF_EXPERTS:
                yield from _packed_experts(kind, name, FORMATS[name])
        for name, form in FORMATS.items():
            if kind == "bfloat16" or name in IN_ALL_TYPES:
                yield from _products(kind, name, form, capability)
    if capability >= FP8_SINCE:
        for head_dim in (64, 128):
            yield _attention("bfloat16", head_dim, "plain", capability, cached=torch.float8_e4m3fn)
            yield _rotary("bfloat16", head_dim, torch.float8_e4m3fn)
        yield _latent("bfloat16", *LATENTS[0], capability, torch.float8_e4m3fn)


def _batch() -> RaggedBatch:
    """A chunk of TOKENS - 1 tokens and a decode row."""
    longs, ints = torch.zeros(TOKENS, dtype=torch.int64), torch.zeros(3, dtype=torch.int32)
    tables = torch.zeros(2, 3, dtype=torch.int32)
    return RaggedBatch(longs, longs, longs, ints, ints[:2], tables, longs[:2], TOKENS - 1, TOKENS)


def _cache(shape: AttentionShape, kind: torch.dtype) -> CudaCache:
    return CudaCache.allocate(4, BLOCK_SIZE, shape, kind, torch.device("cpu"))


def _attention(
    kind: str, head_dim: int, options: str, capability: int, cached: torch.dtype | None = None
) -> Launch:
    window, cap, has_sinks = OPTIONS[options]
    shape = AttentionShape(HEADS, KV_HEADS, head_dim, 0.1, window, cap)
    tuning = default_tuning(head_dim, KINDS[kind], capability)

    def work() -> None:
        query = torch.zeros(TOKENS, HEADS, head_dim, dtype=KINDS[kind])
        sinks = torch.zeros(HEADS) if has_sinks else None
        attention.attend(query, _cache(shape, cached or KINDS[kind]), _batch(), shape, tuning, sinks)

    claims = {"attend_tiles": tuning.prefill.programs, "attend_segments": tuning.decode.programs}
    return Launch(f"head {head_dim}, {options}{', fp8 cache' if cached else ''}", kind, work, claims)


def _rotary(kind: str, head_dim: int, cached: torch.dtype | None = None) -> Launch:
    shape, dtype = AttentionShape(HEADS, KV_HEADS, head_dim, 0.1), KINDS[kind]

    def work() -> None:
        norm = QKNorm(torch.ones(head_dim, dtype=dtype), torch.ones(head_dim, dtype=dtype), 1e-6)
        for each in (norm, None):
            qkv = torch.zeros(TOKENS, (HEADS + 2 * KV_HEADS) * head_dim, dtype=dtype)
            rotary.rotary_store(
                qkv, torch.zeros(64, head_dim), _batch(), _cache(shape, cached or dtype), shape, each)

    return Launch(f"head {head_dim}{', fp8 cache' if cached else ''}", kind, work)


def _latent(kind: str, rank: int, rope_dim: int, capability: int, cached: torch.dtype | None = None) -> Launch:
    """Of a context of one segment, which is walked, and of several, which are divided."""
    shape, dtype = LatentShape(HEADS, rank, rope_dim, 32, 32, 0.1, has_neighbors=True), KINDS[kind]

    def work() -> None:
        cache = latent.CudaLatentCache.allocate(4, BLOCK_SIZE, shape, cached or dtype, torch.device("cpu"))
        products = latent.LatentProducts(
            torch.zeros(HEADS, 32, rank, dtype=dtype), torch.zeros(HEADS, rank, 32, dtype=dtype))
        query = torch.zeros(TOKENS, HEADS * shape.query_dim, dtype=dtype)
        latent.store(query, torch.zeros(TOKENS, shape.width, dtype=dtype), torch.zeros(64, rope_dim), _batch(), cache,
                     shape, LatentNorm(torch.ones(rank), 1e-6))
        for longest in (TOKENS, 4096):
            latent.attend(query, cache, replace(_batch(), max_context_len=longest), shape, products, capability)

    return Launch(f"latent {rank} + {rope_dim}{', fp8 cache' if cached else ''}", kind, work)


def _others(kind: str) -> Iterator[Launch]:
    """Norms, activations, masks and sampling."""
    for hidden in HIDDEN:
        def norms(hidden: int = hidden) -> None:
            x, weight = torch.zeros(TOKENS, hidden, dtype=KINDS[kind]), torch.ones(hidden, dtype=KINDS[kind])
            pointwise.rms_norm(x, weight, 1e-5)
            pointwise.add_rms_norm(x, x.clone(), weight, 1e-5)
            pointwise.layer_norm(x, LayerNormWeights(weight, weight, 1e-5))
            pointwise.layer_norm(x, LayerNormWeights(weight, weight, 1e-5), x.clone())
            for activation in ACTIVATIONS:
                pointwise.activated(x, activation, is_gated=True)
                pointwise.activated(x, activation, is_gated=False)

        yield Launch(f"hidden {hidden}", kind, norms)
    for vocabulary in VOCABULARIES:
        def draw(vocabulary: int = vocabulary) -> None:
            indices = torch.zeros(2, dtype=torch.int64)
            logits = torch.zeros(2, vocabulary, dtype=KINDS[kind])
            sampling.sample(logits, torch.zeros(2, 4), indices, indices)
            sampling.mask_rows(logits, indices, torch.zeros(2, -(-vocabulary // 32), dtype=torch.int32))

        yield Launch(f"vocabulary {vocabulary}", kind, draw)


def _experts(kind: str) -> Iterator[Launch]:
    routing, hidden, intermediate = MIXTURE
    for of_one in FEW_AND_MANY:
        tokens = of_one * routing.num_experts // routing.top_k

        def work(tokens: int = tokens) -> None:
            shapes = (routing.num_experts, 2 * intermediate, hidden), (routing.num_experts, hidden, intermediate)
            stacked = experts.StackedExperts(*([torch.empty(shape, dtype=KINDS[kind])] for shape in shapes), None, None)
            x, logits = (torch.empty(tokens, size, dtype=KINDS[kind]) for size in (hidden, routing.num_experts))
            ends = torch.zeros(routing.num_experts, dtype=torch.int64)
            activate = functools.partial(pointwise.activated, activation="silu", is_gated=True)
            experts.mixture(x, logits, stacked, routing, ends, activate)

        tile = experts_tile(of_one * routing.num_experts, routing.num_experts, KINDS[kind])
        yield Launch(f"{of_one} tokens an expert", kind, work, {"multiply_experts": tile.programs})


def _packed_experts(kind: str, name: str, form: Format) -> Iterator[Launch]:
    routing, outputs = MIXTURE[0], 768
    for of_one in FEW_AND_MANY:
        pairs = of_one * routing.num_experts

        def work(pairs: int = pairs) -> None:
            weight = ExpertCodes(_packed(form, routing.num_experts * outputs), routing.num_experts, None)
            arranged = experts.in_order(torch.zeros(pairs, dtype=torch.int32), routing.num_experts)
            for is_first in (True, False):
                x = torch.empty(pairs // routing.top_k if is_first else pairs, DEPTH, dtype=KINDS[kind])
                experts.multiply(x, weight, None, arranged, routing.top_k, is_first=is_first)

        tile = expert_codes_tile(pairs, routing.num_experts, KINDS[kind])
        yield Launch(f"{of_one} tokens an expert, {name}", kind, work, {"multiply_expert_codes": tile.programs})


def _adapters(kind: str) -> Iterator[Launch]:
    """What four adapters of rank 16 add to the product of three parts."""
    for of_one in FEW_AND_MANY:
        def work(rows: int = 4 * of_one) -> None:
            added = CudaAdapters(4, 16, KINDS[kind], torch.device("cpu")).product(768, 512, 3)
            added.add(torch.empty(rows, 512, dtype=KINDS[kind]), torch.empty(rows, 768, dtype=KINDS[kind]))

        tile = experts_tile(of_one * 4, 4, KINDS[kind])
        yield Launch(f"{of_one} rows an adapter", kind, work, {"multiply_experts": tile.programs})


def _products(kind: str, name: str, form: Format, capability: int) -> Iterator[Launch]:
    """With matrices whose codes are nowhere: only their shapes and types count."""
    for tokens in FEW_AND_MANY:
        def work(tokens: int = tokens) -> None:
            for outputs in (OUTPUTS, WIDE) if tokens == FEW else (OUTPUTS,):
                packed.multiply(torch.empty(tokens, DEPTH, dtype=KINDS[kind]), _packed(form, outputs), None)
            if tokens == FEW:
                ids = torch.zeros(tokens, dtype=torch.int64)
                packed.rows_of(_packed(form, OUTPUTS), ids, KINDS[kind], 1.0)

        tile = codes_tile(tokens, KINDS[kind], has_table=bool(form.levels) and not form.are_floats)
        yield Launch(f"{tokens} tokens, {name}", kind, work, {"multiply_codes": tile.programs})
        if narrow.is_narrow(form, capability):
            def narrowly(tokens: int = tokens) -> None:
                storage = torch.float8_e4m3fn if form.are_floats else torch.int8
                for outputs in (OUTPUTS, WIDE) if tokens == FEW else (OUTPUTS,):
                    matrix = narrow.NarrowMatrix(
                        torch.empty(outputs, DEPTH, dtype=storage), torch.empty(outputs), DEPTH)
                    narrow.multiply(torch.empty(tokens, DEPTH, dtype=KINDS[kind]), matrix, None)

            yield Launch(f"{tokens} tokens, {name} x {name}", kind, narrowly,
                         {"multiply_narrow": narrow_tile(tokens).programs})


def _packed(form: Format, outputs: int) -> packed.PackedMatrix:
    groups = DEPTH // form.group if form.group else 1
    units = torch.empty(outputs, groups // form.groups_per_unit).half() if form.groups_per_unit else None
    factors = Factors(torch.empty(outputs, groups, dtype=form.scale), units)
    levels = torch.empty(len(form.levels)) if form.levels and not form.are_floats else None
    codes_ = torch.empty(outputs, packed.row_bytes(form, DEPTH), dtype=torch.uint8)
    return packed.PackedMatrix(
        form, outputs, DEPTH, codes_, factors, factors if form.has_minimums else None, levels, None, None)
