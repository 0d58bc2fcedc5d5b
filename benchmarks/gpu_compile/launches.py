"""The launches whose kernels are compiled: every configuration that a default can choose, by the code that starts it.

A launch is one step of a layer or of the sampler, on tensors of the CPU whose sizes decide which kernel is compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from slotwise.kernels.cuda import attention, pointwise, rotary, sampling
from slotwise.kernels.cuda.cache import CudaCache
from slotwise.kernels.cuda.configs import default_tuning
from slotwise.kernels.interface import AttentionShape, QKNorm, RaggedBatch

KINDS = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
HEAD_DIMS = (32, 64, 80, 96, 128, 192, 256)
HEADS, KV_HEADS, TOKENS, BLOCK_SIZE = 8, 2, 40, 16
OPTIONS = {  # of attention: window, soft cap, sinks
    "plain": (0, 0.0, False), "window, cap": (64, 50.0, False), "window, sinks": (64, 0.0, True)}
HIDDEN = (576, 4096)
VOCABULARIES = (50_000, 151_936)
FP8_SINCE = 89  # compute capability


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
        yield from _others(kind)
    if capability >= FP8_SINCE:
        for head_dim in (64, 128):
            yield _attention("bfloat16", head_dim, "plain", capability, cached=torch.float8_e4m3fn)
            yield _rotary("bfloat16", head_dim, torch.float8_e4m3fn)


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


def _others(kind: str) -> Iterator[Launch]:
    """Norms, activations and sampling."""
    for hidden in HIDDEN:
        def norms(hidden: int = hidden) -> None:
            x, weight = torch.zeros(TOKENS, hidden, dtype=KINDS[kind]), torch.ones(hidden, dtype=KINDS[kind])
            pointwise.rms_norm(x, weight, 1e-5)
            pointwise.add_rms_norm(x, x.clone(), weight, 1e-5)
            pointwise.activated(x, "silu")
            pointwise.activated(x, "gelu_tanh")

        yield Launch(f"hidden {hidden}", kind, norms)
    for vocabulary in VOCABULARIES:
        def draw(vocabulary: int = vocabulary) -> None:
            indices = torch.zeros(2, dtype=torch.int64)
            sampling.sample(torch.zeros(2, vocabulary, dtype=KINDS[kind]), torch.zeros(2, 4), indices, indices)

        yield Launch(f"vocabulary {vocabulary}", kind, draw)
