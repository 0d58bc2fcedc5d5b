"""Measures what the host-memory tier of the prefix cache saves, with more shared prompts than the device pool holds.

usage: python -m benchmarks.offloading [--model FOLDER] [--device DEVICE] [--groups 12:512] [--requests 96]

The same requests run on three engines in this process: one whose pool holds everything, one whose pool holds a part,
and the latter with host memory for evicted blocks.  It counts computed tokens, which do not depend on clock or
neighbours; seconds are meaningful on a GPU only.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from slotwise import builtin
from slotwise.compose.engine_builder import Loaded, load
from slotwise.core.params import SamplingParams
from slotwise.core.request import RequestSpec
from slotwise.engine.config import EngineConfig
from slotwise.engine.messages import Add

QUESTION, ANSWER, CLIENTS = 48, 16, 4  # tokens, tokens, concurrent requests
EVERYTHING, PART, TIERS = "everything fits", "a part fits", "a part, and host memory"


def requests(groups: int, tokens: int, count: int, vocab_size: int) -> list[Add]:
    """Returns requests that each begin with one of `groups` equally likely system prompts of `tokens` tokens."""
    draw = random.Random(1)
    beginnings = [[draw.randrange(2, vocab_size) for _ in range(tokens)] for _ in range(groups)]
    asked = SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True)
    return [
        Add(f"r{number}",
            RequestSpec(draw.choice(beginnings) + [draw.randrange(2, vocab_size) for _ in range(QUESTION)], asked))
        for number in range(count)]


def run(loaded: Loaded, config: EngineConfig, workload: list[Add]) -> dict[str, Any]:
    """Returns the tokens that an engine computed, found and copied."""
    engine, info = loaded.engine(config)
    block_size = info.limits.block_size
    seen: dict[str, Any] = {"num_blocks": info.limits.num_blocks, "num_host_blocks": info.limits.num_host_blocks}
    counts = dict.fromkeys(("computed", "found", "loaded", "blocks_saved", "blocks_loaded", "preemptions"), 0)
    outputs: dict[str, list[int]] = {}
    waiting, free = deque(workload), CLIENTS
    began = time.perf_counter()
    while waiting or engine.has_work:
        while waiting and free:
            engine.handle(waiting.popleft())
            free -= 1
        record = engine.step()
        free += len(record.ended)
        counts["computed"] += sum(record.counts)
        counts["found"] += sum(record.cached)
        counts["loaded"] += len(record.loads) * block_size
        counts["blocks_saved"] += len(record.saves)
        counts["blocks_loaded"] += len(record.loads)
        counts["preemptions"] += len(record.preempted)
        for name, tokens in zip(record.request_ids, record.token_ids, strict=True):
            outputs.setdefault(name, []).extend(tokens)
    return seen | counts | {
        "block_bytes": info.memory.cache // (info.limits.num_blocks + 1),
        "seconds": round(time.perf_counter() - began, 2), "outputs": outputs}


def compare(asked: argparse.Namespace) -> dict[str, dict[str, Any]]:
    groups, tokens = map(int, asked.groups.split(":"))
    config = EngineConfig(
        model=asked.model or str(builtin.path()), device=asked.device, dtype=asked.dtype, block_size=asked.block_size,
        max_num_seqs=max(CLIENTS, 2 * groups), max_num_batched_tokens=asked.max_num_batched_tokens,
        max_model_len=tokens + QUESTION + ANSWER)
    loaded = load(config)
    workload = requests(groups, tokens, asked.requests, loaded.model_config.vocab_size)
    room = -(-(tokens + QUESTION + ANSWER) // asked.block_size)
    probe = loaded.engine(replace(config, kv_cache_memory=1 << 28))[1]
    block_bytes = probe.memory.cache // (probe.limits.num_blocks + 1)
    pool = int(asked.share * groups * tokens / asked.block_size) + CLIENTS * (room - tokens // asked.block_size)
    part = replace(config, kv_cache_memory=pool * block_bytes)
    tiers = replace(part, kv_offloading_size=groups * room * 2 * block_bytes / 2**30)
    return {name: run(loaded, settings, workload)
            for name, settings in ((EVERYTHING, config), (PART, part), (TIERS, tiers))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a checkpoint's folder (default: the built-in model)")
    parser.add_argument("--device", default="reference", help="reference, or cuda (default: reference)")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--groups", default="12:512", help="system prompts and their tokens (default: 12:512)")
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--share", type=float, default=0.4, help="of the system prompts that the pool holds")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--max-num-batched-tokens", type=int, default=256)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    results = compare(asked)
    outputs = [result.pop("outputs") for result in results.values()]
    table = Table("", *results)
    for name in results[PART]:
        table.add_row(name.replace("_", " "), *(f"{result[name]:,}" for result in results.values()))
    Console().print(table)
    print("all three gave the same tokens" if outputs[0] == outputs[1] == outputs[2] else "TOKENS DIFFER")
    if asked.json:
        asked.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
