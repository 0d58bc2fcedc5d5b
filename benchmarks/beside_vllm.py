"""Measures the same requests on Slotwise, on vLLM or on OpenVINO GenAI: output tokens per second, or decode steps.

    python benchmarks/checkpoint.py CHECKPOINT                                     # a shape with random weights
    python benchmarks/beside_vllm.py slotwise CHECKPOINT --workload mixed:0 mixed:1 azure:0
    VLLM_ENVIRONMENT/bin/python benchmarks/beside_vllm.py vllm CHECKPOINT --workload mixed:0 mixed:1 azure:0
    optimum-cli export openvino --model CHECKPOINT --task text-generation-with-past --weight-format fp16 EXPORTED
    OPENVINO_ENVIRONMENT/bin/python benchmarks/beside_vllm.py openvino EXPORTED --workload mixed:0 mixed:1 azure:0

Slotwise and vLLM are driven through the same offline API, OpenVINO GenAI through its continuous batching pipeline; it
computes in bfloat16 where the processor has instructions for it, whatever the format of the weights.

Each engine runs in an environment of its own, one after the other, never side by side; quote ratios of one session.  A
workload is a name and a seed; one request of each length class is computed first and not counted.

    mixed    log-normal prompts (median 128, sigma 0.9, at most 1,024) and outputs (median 64, sigma 0.9, at most 512)
    azure    lengths of the Azure conversation trace of 2023, an eighth of them

With `--streams`, the time of a decode step by number of streams instead, prompts of 128 tokens: the difference of runs
of 65 tokens and of 1, over 64 steps, so that loading and prefill cancel; the least of three of each.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# vLLM's environment imports only the workload of Slotwise, and nothing of this folder: vLLM imports a `kernels`, too.
HERE = Path(__file__).parent
sys.path[:] = [str(HERE.parent / "src"), *(path for path in sys.path if path != str(HERE))]

from slotwise.measure.workload.distributions import parse_arrivals, parse_lengths  # noqa: E402
from slotwise.measure.workload.workloads import Recipe, Workload, generate  # noqa: E402

SHAPES = {
    "mixed": ("lognormal:128:0.9:1024", "lognormal:64:0.9:512"),
    "azure": ("azure-prompt:0.125", "azure-output:0.125"),
}
VOCABULARY = 4000  # prompts are random ids below it
OPENVINO_CACHE = 4  # GiB
STEPS, STEP_TURNS = 64, 3
VLLM = {"VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_CPU_OMP_THREADS_BIND": "0-1", "VLLM_LOGGING_LEVEL": "WARNING"}


def workload(name: str, count: int) -> Workload:
    """Returns the workload named `name`.  Raises ValueError for an unknown name."""
    kind, _, seed = name.partition(":")
    if kind not in SHAPES or not seed.isdigit():
        raise ValueError(f"a workload is {' or '.join(SHAPES)}, a colon and a seed, not {name!r}")
    inputs, outputs = SHAPES[kind]
    return generate(Recipe(count, parse_lengths(inputs), parse_lengths(outputs), parse_arrivals("at-once")), int(seed))


class OpenVino:
    """OpenVINO GenAI's continuous batching, behind the part of the offline API that `measure` uses."""

    def __init__(
        self, model: str, dtype: str, max_num_seqs: int, max_model_len: int, enable_prefix_caching: bool,
    ) -> None:
        import openvino_genai as genai

        scheduler = genai.SchedulerConfig()
        scheduler.cache_size, scheduler.max_num_seqs = OPENVINO_CACHE, max_num_seqs
        scheduler.max_num_batched_tokens, scheduler.dynamic_split_fuse = 2048, True
        scheduler.enable_prefix_caching = enable_prefix_caching
        self._pipeline = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", {})

    @staticmethod
    def params(temperature: float, ignore_eos: bool, max_tokens: int) -> Any:
        import openvino_genai as genai

        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = max_tokens, ignore_eos, temperature > 0
        return config

    def generate(self, prompts: list[dict[str, list[int]]], params: list[Any], use_tqdm: bool) -> list[Any]:
        import numpy as np
        import openvino

        ids = [openvino.Tensor(np.array([prompt["prompt_token_ids"]], dtype=np.int64)) for prompt in prompts]
        found = self._pipeline.generate(ids, params)
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=one.m_generation_ids[0])]) for one in found]


def engine(name: str) -> tuple[Any, Any]:
    """Returns the engine's `LLM` and `SamplingParams`."""
    if name == "openvino":
        return OpenVino, OpenVino.params
    if name == "vllm":
        os.environ.update({key: os.environ.get(key, value) for key, value in VLLM.items()})
        import vllm

        return vllm.LLM, vllm.SamplingParams
    import slotwise

    return slotwise.LLM, slotwise.SamplingParams


def measure(llm: Any, params: Any, work: Workload) -> dict[str, float]:
    prompts = [{"prompt_token_ids": work.prompt_ids(request, VOCABULARY)} for request in work.requests]
    asked = [params(temperature=0, ignore_eos=True, max_tokens=request.num_output) for request in work.requests]
    began = time.perf_counter()
    answers = llm.generate(prompts, asked, use_tqdm=False)
    seconds = time.perf_counter() - began
    tokens = sum(len(answer.outputs[0].token_ids) for answer in answers)
    return {"seconds": seconds, "prompt_tokens": work.prompt_tokens, "output_tokens": tokens,
            "output_tokens_per_second": tokens / seconds}


def step_seconds(llm: Any, params: Any, streams: int) -> float:
    """The seconds of a decode step of `streams` rows."""
    def seconds(tokens: int, number: int) -> float:
        recipe = Recipe(
            streams, parse_lengths("fixed:128"), parse_lengths(f"fixed:{tokens}"), parse_arrivals("at-once"))
        return measure(llm, params, generate(recipe, number))["seconds"]

    first, whole = (min(seconds(tokens, 10 * tokens + turn) for turn in range(STEP_TURNS)) for tokens in (1, STEPS + 1))
    return (whole - first) / STEPS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=("slotwise", "vllm", "openvino"), help="which one runs here")
    parser.add_argument("model", help="a checkpoint's folder, of openvino an exported one")
    parser.add_argument("--workload", nargs="+", default=["mixed:0"], metavar="NAME:SEED",
                        help="mixed or azure, and a seed")
    parser.add_argument("--requests", type=int, default=64, help="requests of a run")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="of the engine")
    parser.add_argument("--streams", type=int, nargs="+", default=[], help="measure decode steps of as many rows")
    asked = parser.parse_args()
    llm_type, params = engine(asked.engine)
    began = time.perf_counter()
    settings = dict(setting.split("=", 1) for setting in asked.set)
    llm = llm_type(model=asked.model, dtype="bfloat16", max_num_seqs=64, max_model_len=2048,
                   enable_prefix_caching=False, **settings)
    measure(llm, params, workload("mixed:999", 2))
    print(f"ready after {time.perf_counter() - began:.1f} s", flush=True)
    for streams in asked.streams:
        step = {"engine": asked.engine, "streams": streams, "step_seconds": step_seconds(llm, params, streams)}
        print(json.dumps(step), flush=True)
    for name in () if asked.streams else asked.workload:
        figures = measure(llm, params, workload(name, asked.requests))
        print(json.dumps({"engine": asked.engine, "workload": name} | figures), flush=True)


if __name__ == "__main__":
    main()
