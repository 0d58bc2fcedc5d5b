"""Adapters beside the base model: decode rates in pairs, and how long loading one takes.

usage: python -m benchmarks.overheads lora CHECKPOINT [--pairs N] [--json FILE]

Each pair runs the same prompts on an engine without adapters and on one with `enable_lora`: rows of the base model,
of one adapter, and of eight adapters in turn, of rank 16 on every product.  A rate is output tokens a second of a call.
Adapters are random: speed does not depend on their values.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from benchmarks.commands import bar, parser_of
from safetensors import safe_open
from safetensors.torch import save_file

from slotwise import LLM, LoRARequest, SamplingParams

RANK, ADAPTERS, TOKENS, PROMPT = 16, 8, 48, 16
PRODUCTS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(folder: Path, base: Path, seed: int) -> LoRARequest:
    """A random adapter of all products of a checkpoint."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    with safe_open(base / "model.safetensors", framework="pt") as file:
        for name in file.keys():  # noqa: SIM118
            module = name.removesuffix(".weight")
            if module.rpartition(".")[2] in PRODUCTS:
                outputs, inputs = file.get_slice(name).get_shape()
                for factor, size in (("A", (RANK, inputs)), ("B", (outputs, RANK))):
                    values = torch.randn(size, generator=generator) / 100
                    tensors[f"base_model.model.{module}.lora_{factor}.weight"] = values.bfloat16()
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": RANK, "lora_alpha": RANK}))
    return LoRARequest(folder.name, seed + 1, str(folder))


def rate(llm: LLM, rows: int, adapters: list[LoRARequest]) -> float:
    """Output tokens per second of `rows` prompts, with the adapters in turn."""
    prompts = [{"prompt_token_ids": [row * 37 % 1000 + place for place in range(PROMPT)]} for row in range(rows)]
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    each = [adapters[row % len(adapters)] if adapters else None for row in range(rows)]
    started = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False, lora_request=each)
    return rows * TOKENS / (time.perf_counter() - started)


def measured(base: Path, folder: Path, pairs: int) -> dict[str, list[float]]:
    """Rates with adapters over those without, by rows and adapters, one number a pair; and milliseconds of loading."""
    arguments = {"max_num_seqs": 64, "max_model_len": 256, "kv_cache_memory": 400 << 20, "enable_prefix_caching": False}
    plain = LLM(str(base), **arguments)
    llm = LLM(str(base), enable_lora=True, max_loras=ADAPTERS, **arguments)
    requests = [write_adapter(folder / str(number), base, number) for number in range(ADAPTERS)]
    found: dict[str, list[float]] = {"milliseconds of loading, with 1 row of 48 tokens": []}
    for request in requests:
        started = time.perf_counter()
        rate(llm, 1, [request])
        found["milliseconds of loading, with 1 row of 48 tokens"].append(1000 * (time.perf_counter() - started))
    for rows in (64, 1):
        rate(plain, rows, [])
        for number in (0, 1, ADAPTERS) if rows > 1 else (0, 1):
            rate(llm, rows, requests[:number])
            found[f"{rows} rows, {number} adapters"] = [
                rate(llm, rows, requests[:number]) / rate(plain, rows, [])
                for _ in bar(range(pairs), f"{rows} rows, {number} adapters")]
    return found


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("checkpoint", type=Path, help="a checkpoint's folder")
    parser.add_argument("--pairs", type=int, default=5, help="pairs of runs")
    parser.add_argument("--json", type=Path, help="write the figures here")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measured(given.checkpoint, Path(folder), given.pairs)
    for name, values in found.items():
        print(f"{name}: median {statistics.median(values):.3f} [{min(values):.3f}, {max(values):.3f}]")
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")
