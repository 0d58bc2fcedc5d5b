"""On a real engine, layers with a window hold the bytes that arithmetic predicts."""

from __future__ import annotations

import pytest
from support import checkpoints

from slotwise.compose.engine_builder import load
from slotwise.core.params import SamplingSpec
from slotwise.core.request import RequestSpec
from slotwise.engine.config import EngineConfig
from slotwise.engine.messages import Add

PROMPT, OUTPUT, WINDOW, LAYERS = 700, 12, 48, 4  # half of the layers have a window


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3", "gpt_oss"])
def test_windows_save_the_bytes_that_arithmetic_predicts(name, tmp_path):
    """Within 5 % of what a layer with a window saves: all tokens but those of the window."""
    config = EngineConfig.of(
        model=str(checkpoints.make(name, tmp_path)), dtype="float32", block_size=4, kv_cache_memory=64 << 20,
        max_model_len=2048, max_num_seqs=4)
    model = load(config)
    subject, info = model.engine(config)
    assert info.limits.windows == (0, WINDOW)
    (prompt,) = checkpoints.prompts([PROMPT], seed=13)
    subject.handle(Add("r0", RequestSpec(prompt, SamplingSpec(temperature=0, max_tokens=OUTPUT, ignore_eos=True))))
    held = 0
    while subject.has_work:
        record = subject.step()
        if record.counters.num_running and record.tokens[0]:
            held = max(held, info.limits.num_blocks - record.counters.num_free_blocks)
    block_bytes = info.memory.cache / (info.limits.num_blocks + 1)
    kernels, config = model._decoder.kernels, model._decoder.config
    layer_bytes = kernels.cache_bytes_per_block(4, model._decoder.layer_shapes[0], config.dtype) / 4  # a token's
    whole, half = LAYERS * (PROMPT + OUTPUT) * layer_bytes, LAYERS // 2
    saved = whole - held * block_bytes
    assert saved == pytest.approx(half * (PROMPT + OUTPUT - WINDOW) * layer_bytes, rel=0.05)
