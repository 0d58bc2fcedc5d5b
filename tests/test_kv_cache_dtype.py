"""An int8 cache through a whole model: options, memory, what is told of it, and answers near those without."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.checkpoints import make, prompts
from support.live import serving
from support.ragged import Driver

from slotwise import LLM, SamplingParams
from slotwise.cli import main
from slotwise.compute.kernels.select import choose
from slotwise.compute.model.loading import load_model
from slotwise.engine.config import ConfigError, EngineConfig
from slotwise.offline.outputs import CompletionOutput

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
SMALL = {"max_num_seqs": 8, "max_model_len": 256, "max_num_batched_tokens": 64}
FUNCTIONS = ["def __init__(self, name):", "def close(self):", "def read_lines(path):", "def add(a, b):",
             "class Stack:\n    def push(self, item):", "import os\n\ndef walk(top):"]


def answers(**settings: object) -> list[CompletionOutput]:
    params = replace(GREEDY, logprobs=5)
    return [output.outputs[0] for output in LLM(**SMALL, **settings).generate(FUNCTIONS, params, use_tqdm=False)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_greedy_tokens_part_only_where_two_are_nearly_as_likely(dtype):
    """From there on the answers are answers to different questions, and tell nothing."""
    for whole, other in zip(answers(dtype=dtype), answers(dtype=dtype, kv_cache_dtype="int8"), strict=True):
        for told, ours, theirs in zip(whole.logprobs, whole.token_ids, other.token_ids, strict=True):
            if ours != theirs:
                assert told[theirs].logprob > told[ours].logprob - 0.2, told
                break


def test_a_signature_is_completed():
    [output] = LLM(kv_cache_dtype="int8", **SMALL).generate(
        ["def __init__(self, name):"], SamplingParams(temperature=0.0, max_tokens=12), use_tqdm=False)
    assert "self.name = name" in output.outputs[0].text


@pytest.mark.parametrize("settings", [
    {}, {"quantization": "int8"}, {"block_size": 16, "max_num_batched_tokens": 24}, {"dtype": "float32"}],
    ids=["", "int8 weights", "small blocks and chunks", "float32"])
def test_outputs_are_the_same_alone_in_company_and_from_cached_blocks(settings):
    llm = LLM(kv_cache_dtype="int8", **SMALL | settings)
    beginning = prompts([130])[0]
    asked = [{"prompt_token_ids": beginning[:shared] + own} for shared, own in zip(
        (0, 130, 70, 128, 3, 64), prompts([5, 9, 33, 64, 17, 70], seed=1), strict=True)]
    together = llm.generate(asked, GREEDY, use_tqdm=False)
    for prompt, crowd in zip(asked, together, strict=True):
        [alone] = llm.generate([prompt], GREEDY, use_tqdm=False)
        assert alone.outputs[0].token_ids == crowd.outputs[0].token_ids


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [10**6, 37])
@pytest.mark.parametrize("family", ["llama3", "smollm2", "mistral", "qwen2", "qwen3"])
def test_greedy_tokens_are_those_of_the_reference_with_such_a_cache(family: str, chunk: int, tmp_path: Path):
    folder, continued = make(family, tmp_path), []
    for device in ("cpu", "reference"):
        decoder = load_model(folder, kernels=choose(device, kv_cache_dtype="int8"), dtype="float32")
        continued.append(Driver(decoder).greedy(prompts([5, 23, 70, 150]), 12, chunk))
    assert continued[0] == continued[1]


def test_the_same_memory_holds_nearly_twice_the_blocks():
    memory = 2_000_000
    whole, half = (LLM(kv_cache_memory=memory, dtype="bfloat16", kv_cache_dtype=name, **SMALL).info
                   for name in ("auto", "int8"))
    assert (whole.cache_dtype, half.cache_dtype) == ("bfloat16", "int8")
    assert 1.85 < half.limits.num_blocks / whole.limits.num_blocks < 2
    for info in (whole, half):
        a_block = info.memory.cache / (info.limits.num_blocks + 1)  # one belongs to nobody
        assert memory - a_block < info.limits.num_blocks * a_block <= memory
    assert half.roofline.position_bytes * 64 == half.memory.cache / (half.limits.num_blocks + 1)


def test_what_cannot_be_is_refused():
    with pytest.raises(ConfigError, match="kv_cache_dtype must be one of auto, int8, fp8, not 'int4'"):
        EngineConfig(model="anywhere", kv_cache_dtype="int4")


def test_a_bad_option_is_one_line(capsys: pytest.CaptureFixture[str]):
    assert main(["generate", "--kv-cache-dtype", "fp8", "--device", "cpu", "def f(x):"]) == 1
    told = capsys.readouterr().err
    assert told == "slotwise generate: --kv-cache-dtype must be auto or int8 on device cpu, not 'fp8'\n"


def test_a_server_tells_what_its_cache_holds(tmp_path: Path):
    with serving("--kv-cache-dtype", "int8", "--device", "cpu", "--max-num-seqs", "2", log=tmp_path / "log") as live:
        told = live.client.get("/metrics").text
        answer = live.client.post("/v1/completions", json={
            "model": "slotwise-builtin", "prompt": "def __init__(self, name):", "max_tokens": 12, "temperature": 0})
    assert 'cache_dtype="int8"' in told
    assert "self.name = name" in answer.json()["choices"][0]["text"]
