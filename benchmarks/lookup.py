"""Prompt lookup on Slotwise beside OpenVINO GenAI's: one greedy stream, with drafts and without, in turns.

    python benchmarks/lookup.py slotwise CHECKPOINT
    OPENVINO_ENVIRONMENT/bin/python benchmarks/lookup.py openvino EXPORTED

Each engine runs in an environment of its own, one after the other, never side by side; quote ratios of one sitting.
Prompts are random token ids, the same for both.  Random weights soon repeat themselves, so lookups are mostly right:
what is compared is what verifying costs.  Figures are output tokens per second.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:] = [str(HERE.parent / "src"), *(path for path in sys.path if path != str(HERE))]

PROMPTS, PROMPT_TOKENS, OUTPUT_TOKENS = 4, 64, 128
VOCABULARY = 40_000
DRAFTS, LOOKED_UP = 8, 3  # of a step, and tokens of a match; OpenVINO takes fixed numbers, Slotwise them as the most

Generate = Callable[[list[int]], list[int]]


def slotwise_by(model: str, *, lookup: bool) -> Generate:
    from slotwise import LLM, SamplingParams

    drafts = {"method": "ngram", "num_speculative_tokens": DRAFTS} if lookup else {"method": "none"}
    llm = LLM(model=model, dtype="bfloat16", max_num_seqs=1, max_model_len=1024, enable_prefix_caching=False,
              speculative_config=drafts)
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=OUTPUT_TOKENS)
    return lambda ids: list(llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)[0].outputs[0].token_ids)


def openvino_by(model: str, *, lookup: bool) -> Generate:
    import numpy as np
    import openvino
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size, scheduler.enable_prefix_caching, scheduler.max_num_batched_tokens = 1, False, 2048
    options = {"INFERENCE_PRECISION_HINT": "bf16"} | ({"prompt_lookup": True} if lookup else {})
    pipeline = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", options)
    config = genai.GenerationConfig()
    config.max_new_tokens, config.ignore_eos, config.do_sample = OUTPUT_TOKENS, True, False
    if lookup:
        config.num_assistant_tokens, config.max_ngram_size = DRAFTS, LOOKED_UP

    def generate(ids: list[int]) -> list[int]:
        found = pipeline.generate([openvino.Tensor(np.array([ids], dtype=np.int64))], [config])
        return list(found[0].m_generation_ids[0])

    return generate


ENGINES: dict[str, Callable[..., Generate]] = {"slotwise": slotwise_by, "openvino": openvino_by}


def rate(generate: Generate, prompts: list[list[int]]) -> float:
    began = time.perf_counter()
    tokens = sum(len(generate(ids)) for ids in prompts)
    return round(tokens / (time.perf_counter() - began), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("model", help="a checkpoint's folder, of openvino an exported one")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    draw = random.Random(asked.seed)
    prompts = [[draw.randrange(300, VOCABULARY) for _ in range(PROMPT_TOKENS)] for _ in range(PROMPTS)]
    found: dict[str, list[float]] = {"plain": [], "lookup": []}
    by = {name: ENGINES[asked.engine](asked.model, lookup=name == "lookup") for name in found}
    for generate in by.values():
        generate(prompts[0])
    for pair in range(asked.pairs):
        for name in list(by)[:: 1 if pair % 2 else -1]:
            found[name].append(rate(by[name], prompts))
    gains = statistics.median(a / b for a, b in zip(found["lookup"], found["plain"], strict=True))
    print(json.dumps({"engine": asked.engine, "seed": asked.seed, **found, "gain": round(gains, 2)}))


if __name__ == "__main__":
    main()
