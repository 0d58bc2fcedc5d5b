"""Prints the tokens of the built-in model, greedy, for each way in which the CPU's kernels compute everywhere."""

from __future__ import annotations

import json
import sys

from slotwise import LLM, SamplingParams

SETTINGS: tuple[dict[str, str], ...] = (
    {"dtype": "float32"}, {"dtype": "bfloat16"}, {"dtype": "bfloat16", "quantization": "int8"},
    {"dtype": "bfloat16", "quantization": "int4"}, {"dtype": "float32", "kv_cache_dtype": "int8"})
PROMPTS = ("def add(a, b):", "class Stack:\n    def", "import os\n")
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)

for settings in SETTINGS:
    llm = LLM(device="cpu", max_num_seqs=4, max_model_len=256, kv_cache_memory=16 << 20, **settings)
    print(f"{settings}: {llm.info.product_path} products", file=sys.stderr, flush=True)
    print(json.dumps([settings, [each.outputs[0].token_ids for each in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]]))
