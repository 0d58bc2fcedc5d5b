"""vLLM's examples of offline inference, with its arguments, on the built-in model: only the imports differ.

After examples/offline_inference of vllm-project/vllm: basic/basic.py, basic/generate.py, basic/chat.py,
prefix_caching.py, metrics.py and async_llm_streaming.py.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from slotwise import LLM, AsyncEngineArgs, AsyncLLM, EngineArgs, RequestOutput, SamplingParams, builtin
from slotwise.observe.offline import Counter, Gauge, Histogram
from slotwise.offline.sampling_params import RequestOutputKind

pytestmark = pytest.mark.slow

MODEL = str(builtin.path())
PROMPTS = ["def read_lines(path):", "def is_empty(self):", "class Stack:\n    def push(self, item):", "def add(a, b):"]
PREFIX = "import os\nimport sys\n" + "".join(f"def number_{i}():\n    return {i}\n\n" for i in range(30))


def test_basic() -> None:
    sampling_params = SamplingParams(temperature=0.8, top_p=0.95)
    llm = LLM(model=MODEL)
    outputs = llm.generate(PROMPTS, sampling_params)
    shown = [(output.prompt, output.outputs[0].text) for output in outputs]
    assert [prompt for prompt, _ in shown] == PROMPTS and all(isinstance(output, RequestOutput) for output in outputs)
    assert all(1 <= len(output.outputs[0].token_ids) <= 16 for output in outputs), "vLLM's default of max_tokens"


def test_generate() -> None:
    """All arguments of the engine are in a dict, each with vLLM's default, and defaults of sampling are changed."""
    args: dict[str, Any] = {
        "model": MODEL, "tokenizer": None, "tokenizer_mode": "auto", "skip_tokenizer_init": False,
        "trust_remote_code": False, "revision": None, "download_dir": None, "load_format": "auto", "dtype": "auto",
        "kv_cache_dtype": "auto", "seed": 0, "max_model_len": None, "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1, "block_size": None, "enable_prefix_caching": None, "swap_space": 4,
        "cpu_offload_gb": 0, "gpu_memory_utilization": 0.92, "max_num_batched_tokens": None, "max_num_seqs": None,
        "max_logprobs": 20, "disable_log_stats": True, "quantization": None, "enforce_eager": False,
        "hf_overrides": {}, "enable_chunked_prefill": None, "enable_lora": False, "max_loras": 1,
        "limit_mm_per_prompt": {}, "scheduling_policy": "fcfs", "generation_config": "auto",
        "override_generation_config": {}, "speculative_config": None, "async_scheduling": None,
        "compilation_config": {"mode": None}, "disable_custom_all_reduce": False, "stream_interval": 1}
    llm = LLM(**args)
    sampling_params = llm.get_default_sampling_params()
    sampling_params.max_tokens = 8
    sampling_params.temperature = 0.0
    sampling_params.top_p = 1.0
    sampling_params.top_k = -1
    outputs = llm.generate(PROMPTS, sampling_params)
    assert [output.prompt for output in outputs] == PROMPTS
    assert all(len(output.outputs[0].token_ids) <= 8 for output in outputs)
    again = LLM.from_engine_args(EngineArgs(**args)).generate(PROMPTS, sampling_params.clone(), use_tqdm=False)
    assert [output.outputs[0].text for output in again] == [output.outputs[0].text for output in outputs]


def test_chat() -> None:
    llm = LLM(model=MODEL, enforce_eager=True, max_model_len="1k")
    sampling_params = SamplingParams(max_tokens=8, temperature=0.0, top_p=1.0, top_k=0)
    conversation = [
        {"role": "system", "content": "You complete functions"},
        {"role": "user", "content": "def add(a, b):"},
        {"role": "assistant", "content": "    return a + b"},
        {"role": "user", "content": "def is_empty(self):"},
    ]
    outputs = llm.chat(conversation, sampling_params, use_tqdm=False)
    assert len(outputs) == 1 and "def is_empty(self):" in (outputs[0].prompt or "") and outputs[0].outputs[0].text
    many = llm.chat([conversation for _ in range(10)], sampling_params, use_tqdm=True)
    assert {output.outputs[0].text for output in many} == {outputs[0].outputs[0].text} and len(many) == 10
    template = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
    templated = llm.chat([conversation] * 2, sampling_params, use_tqdm=False, chat_template=template)
    assert [output.prompt for output in templated] == ["\n".join(one["content"] for one in conversation) + "\n"] * 2


def test_prefix_caching() -> None:
    prompts = [PREFIX + prompt for prompt in PROMPTS]
    sampling_params = SamplingParams(temperature=0.0)
    regular_llm = LLM(model=MODEL, gpu_memory_utilization=0.4, enable_prefix_caching=False, dtype="float32")
    regular = regular_llm.generate(prompts, sampling_params)
    del regular_llm
    cached_llm = LLM(model=MODEL, enable_prefix_caching=True, gpu_memory_utilization=0.4, dtype="float32")
    cached_llm.generate(prompts[0], sampling_params)
    cached = cached_llm.generate(prompts, sampling_params)
    assert [output.outputs[0].text for output in cached] == [output.outputs[0].text for output in regular]
    assert all((output.num_cached_tokens or 0) > 200 for output in cached)
    assert [output.num_cached_tokens for output in regular] == [0] * 4


def test_metrics() -> None:
    llm = LLM(model=MODEL, disable_log_stats=False)
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0.8, top_p=0.95))
    shown = {}
    for metric in llm.get_metrics():
        if isinstance(metric, Gauge | Counter):
            shown[metric.name] = metric.value
        elif isinstance(metric, Histogram):
            shown[metric.name] = metric.sum
            assert metric.buckets["+Inf"] == metric.count
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    assert shown["slotwise:generation_tokens"] == shown["vllm:generation_tokens"] == num_tokens


def test_async_llm_streaming() -> None:
    async def stream_response(engine: AsyncLLM, prompt: str, request_id: str) -> str:
        sampling_params = SamplingParams(
            max_tokens=40, temperature=0.8, top_p=0.95, seed=42, output_kind=RequestOutputKind.DELTA)
        text = ""
        async for output in engine.generate(request_id=request_id, prompt=prompt, sampling_params=sampling_params):
            for completion in output.outputs:
                text += completion.text
            if output.finished:
                break
        return text

    async def main() -> list[str]:
        engine_args = AsyncEngineArgs(model=MODEL, enforce_eager=True)
        engine = AsyncLLM.from_engine_args(engine_args)
        try:
            return [await stream_response(engine, prompt, f"stream-example-{i}")
                    for i, prompt in enumerate([*PROMPTS, PROMPTS[0]], 1)]
        finally:
            engine.shutdown()

    texts = asyncio.run(main())
    assert len(texts) == 5 and texts[0] == texts[-1] and all(texts), "a seed repeats a text"
