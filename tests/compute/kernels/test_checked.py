"""Kernels that check what they are given: silent about what is right, clear about what is not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from support import checkpoints
from support.paged import Layer, rotary

from slotwise.compose.engine_builder import load
from slotwise.compute.kernels.checked import CheckedKernels, KernelArgumentError
from slotwise.compute.kernels.interface import AttentionShape, QKNorm
from slotwise.compute.kernels.reference import ReferenceKernels
from slotwise.core.params import SamplingSpec
from slotwise.core.request import RequestSpec
from slotwise.engine.config import EngineConfig
from slotwise.engine.messages import Add

SHAPE = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=8, scale=0.5)
LAYER = Layer(SHAPE, 4, torch.float32, [(1, 7), (3, 5)])
TOKENS, WIDTH = 4, (4 + 2 * 2) * 8


@pytest.fixture
def kernels() -> CheckedKernels:
    return CheckedKernels(ReferenceKernels())


def test_a_layer_computes_as_without_checks(kernels):
    plain = ReferenceKernels()
    batch, qkv = LAYER.batch(), torch.randn(TOKENS, WIDTH)
    norm = QKNorm(torch.rand(8), torch.rand(8), 1e-5)
    results = []
    for subject in (plain, kernels):
        cache = LAYER.filled_cache(subject)
        query = subject.rotary_store(qkv, rotary(8, 16), batch, cache, SHAPE, norm)
        x = subject.attention(query, cache, batch, SHAPE)
        x = subject.gated(torch.ones(12, 32), torch.ones(12))(x)
        x = subject.add_rms_norm(x, torch.ones(TOKENS, 6), torch.ones(6), 1e-5)
        results.append(subject.head(torch.ones(9, 3))(subject.silu_mul(x)))
    assert torch.equal(*results)


Call = Callable[[CheckedKernels], object]

WRONG: dict[str, tuple[Call, str]] = {
    "depth": (lambda k: k.linear(torch.ones(6, 32))(torch.ones(2, 31)), r"x has shape \[2, 31\], not \[2, 32\]"),
    "bias": (lambda k: k.linear(torch.ones(6, 32), torch.ones(5)), r"bias has shape \[5\], not \[6\]"),
    "type": (lambda k: k.linear(torch.ones(6, 32))(torch.ones(2, 32).bfloat16()), "is torch.bfloat16"),
    "ids": (lambda k: k.embed(torch.ones(9, 4), torch.ones(3, dtype=torch.int32)), "token_ids is torch.int32"),
    "norm": (lambda k: k.rms_norm(torch.ones(3, 4), torch.ones(5), 1e-5), "weight has shape"),
    "residual": (lambda k: k.add_rms_norm(torch.ones(3, 4), torch.ones(2, 4), torch.ones(4), 1e-5), "residual"),
    "odd": (lambda k: k.silu_mul(torch.ones(3, 5)), "gate_up has shape"),
    "elsewhere": (lambda k: k.rms_norm(torch.ones(3, 4), torch.ones(4, device="meta"), 1e-5), "is on meta, not on cpu"),
    "query": (lambda k: k.attention(torch.ones(3, 4, 8), LAYER.filled_cache(k), LAYER.batch(), SHAPE), "query"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_named(kernels, what):
    call, message = WRONG[what]
    with pytest.raises(KernelArgumentError, match=message):
        call(kernels)


@pytest.mark.parametrize("change", [
    {"positions": torch.zeros(5, dtype=torch.int64)}, {"slot_mapping": torch.zeros(4, dtype=torch.int32)},
    {"query_starts": torch.zeros(2, dtype=torch.int32)}, {"context_lens": torch.zeros(2)},
    {"block_tables": torch.zeros(3, 4, dtype=torch.int32)}, {"max_query_len": 5}, {"max_context_len": 2}])
def test_columns_that_do_not_belong_together(kernels, change):
    kernels.check_batch(LAYER.batch())
    with pytest.raises(KernelArgumentError):
        kernels.check_batch(replace(LAYER.batch(), **change))


def generated(config: EngineConfig) -> tuple[list[int], bool]:
    """Eight tokens, and whether the kernels that computed them were checked."""
    seen = []
    engine, _ = load(config, wrap=lambda kernels: seen.append(kernels) or kernels).engine(config)
    engine.handle(Add("r", RequestSpec(list(range(3, 20)), SamplingSpec(temperature=0, max_tokens=8))))
    tokens = []
    while engine.has_work:
        record = engine.step()
        assert not record.outcome.failure
        tokens += [token for row in record.tokens for token in row]
    return tokens, isinstance(seen[0], CheckedKernels)


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_an_engine_in_debug_mode_is_checked(device, tmp_path, monkeypatch):
    folder = checkpoints.make("qwen3", tmp_path)
    config = EngineConfig.of(model=str(folder), device=device, max_model_len=64, kv_cache_memory=8 << 20)
    monkeypatch.delenv("SLOTWISE_DEBUG", raising=False)
    tokens, is_checked = generated(config)
    assert not is_checked and len(tokens) == 8
    monkeypatch.setenv("SLOTWISE_DEBUG", "1")
    assert generated(config) == (tokens, True)
