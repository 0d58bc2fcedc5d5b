"""`half` and `float`, in a process and on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.checkpoints import make
from support.live import serving

from slotwise import LLM, SamplingParams
from slotwise.engine.config import ConfigError, EngineConfig

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
TOLD = "device cpu computes in bfloat16 and not in float16: weights stored in float16 are rounded"


@pytest.fixture(scope="module")
def stored_in_halves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("smollm2", tmp_path_factory.mktemp("halves") / "model", dtype="float16", tokenizer=True)


def test_a_config_takes_vllm_s_names() -> None:
    assert EngineConfig.of(model="", dtype="half") == EngineConfig.of(model="", dtype="float16")
    assert EngineConfig(model="", dtype="float").dtype == "float32"
    with pytest.raises(ConfigError, match="dtype must be one of auto, bfloat16, float16, float32, not 'double'"):
        EngineConfig(model="", dtype="double")


def test_half_is_bfloat16_on_a_cpu(stored_in_halves: Path, caplog: pytest.LogCaptureFixture) -> None:
    texts = []
    for dtype in ("half", "float16", "auto", "bfloat16"):
        caplog.clear()
        llm = LLM(str(stored_in_halves), device="cpu", dtype=dtype, max_num_seqs=2, kv_cache_memory=1 << 22)
        assert llm.info.dtype == "bfloat16"
        assert [TOLD in record.getMessage() for record in caplog.records] == [True] * (dtype != "bfloat16")
        texts.append(llm.generate("def add(a, b):", GREEDY, use_tqdm=False)[0].outputs[0].token_ids)
    assert len(set(map(tuple, texts))) == 1


@pytest.mark.slow
def test_a_server_says_so_once(stored_in_halves: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    model = str(stored_in_halves)
    with serving(model, "--device", "cpu", "--dtype", "half", "--kv-cache-memory", "4M", log=log) as live:
        made = live.client.post("/v1/completions", json={"model": model, "prompt": "def", "max_tokens": 3}).json()
    assert made["usage"]["completion_tokens"] <= 3
    assert log.read_text().count(TOLD) == 1
