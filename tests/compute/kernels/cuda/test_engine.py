"""A whole engine over the Triton kernels, their sampling included: the CPU's tokens, one step in flight.

On a GPU this runs from captured graphs of a few sizes, with requests that join, leave and yield all the time.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from support import checkpoints
from support.cuda_device import DEVICE, KERNELS, thinned

from slotwise.compose.engine_builder import load
from slotwise.compute.kernels.cuda import CudaKernels
from slotwise.core.params import SamplingSpec
from slotwise.core.request import RequestSpec
from slotwise.engine.config import EngineConfig
from slotwise.engine.messages import Add

ON_GPU = DEVICE == "cuda"
REQUESTS, OUTPUT = (40, 40) if ON_GPU else (3, 3)
PER_BLOCK = 2 * 16 * 2 * 16 * 4  # keys and values, tokens, heads, head_dim, float32; a layer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.make("llama3", tmp_path_factory.mktemp("llama3"), hidden_size=32, intermediate_size=48,
                            num_hidden_layers=1, num_attention_heads=4, head_dim=16, vocab_size=300)


def outputs(folder: Path, device: str, kernels: CudaKernels | None = None, **settings: object) -> dict[str, list[int]]:
    config = EngineConfig.of(**{
        "model": str(folder), "device": device, "dtype": "float32", "max_model_len": 160, "max_num_seqs": 9,
        "max_num_batched_tokens": 32, "block_size": 16, "kv_cache_memory": 64 * PER_BLOCK} | settings)
    engine, _ = load(config, wrap=lambda own: kernels or own).engine(config)
    draw, found = random.Random(1), {}
    waiting = [[token % 290 + 3 for token in prompt] for prompt in checkpoints.prompts(
        [draw.randint(1, 30) for _ in range(REQUESTS)], seed=5)]
    step = 0
    while waiting or engine.has_work:
        if waiting:
            name = f"r{len(waiting)}"
            asked = SamplingSpec(
                temperature=0, max_tokens=OUTPUT, ignore_eos=True, repetition_penalty=draw.choice([1.0, 1.2]))
            engine.handle(Add(name, RequestSpec(waiting.pop(), asked, step)))
        record = engine.step()
        assert not record.outcome.failure and not any(end.message for end in record.ended)
        for name, tokens in zip(record.plan.request_ids, record.tokens, strict=True):
            found.setdefault(name, []).extend(tokens)
        step += 1
    return found


@pytest.mark.parametrize("blocks", [64, 24] if ON_GPU else [64])
def test_the_same_tokens_as_on_the_cpu(folder, blocks):
    expected = outputs(folder, "cpu", overlap=0)
    assert len(expected) == REQUESTS and all(len(tokens) == OUTPUT for tokens in expected.values())
    device = "cuda" if ON_GPU else "reference"
    assert outputs(folder, device, KERNELS, overlap=1, kv_cache_memory=blocks * PER_BLOCK) == expected


@pytest.mark.parametrize("settings", thinned(
    {"kv_cache_dtype": "fp8", "dtype": "float16"}, {"kv_cache_dtype": "fp8"}, {"dtype": "float16"}, few=1), ids=str)
def test_the_same_tokens_as_the_reference_in_fewer_bits(folder, settings):
    """For most: where two tokens are nearly as likely, what both round apart decides."""
    expected = outputs(folder, "reference", overlap=0, **settings)
    kernels = CudaKernels(DEVICE, kv_cache_dtype=settings.get("kv_cache_dtype", "auto"))
    found = outputs(folder, "cuda" if ON_GPU else "reference", kernels, overlap=1, **settings)
    assert found.keys() == expected.keys()
    assert sum(found[name] == expected[name] for name in expected) > len(expected) / 2
