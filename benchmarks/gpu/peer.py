"""Runs the same trace through the continuous batching of transformers, on the same shape with random weights."""

from __future__ import annotations

import time
from typing import Any

import torch
from benchmarks.gpu.figures import tell
from benchmarks.gpu.setup import Setup, asked
from benchmarks.gpu.trace import requests

WARM_UP = 16  # requests before the clock runs
PATIENCE = 60.0  # seconds without any result


def main() -> None:
    setup = asked(__doc__)
    trace = list(requests(setup))
    with torch.inference_mode():
        manager = _manager(setup, _model(setup))
        manager.start()
        run(manager, "warm", trace[:WARM_UP])
        seconds, tokens = run(manager, "timed", trace)
        manager.stop(block=True)
    tell(transformers={
        "requests": len(trace), "output_tokens": tokens, "seconds": seconds,
        "output_tokens_per_second": tokens / seconds})


def run(manager: Any, name: str, trace: list[tuple[list[int], int]]) -> tuple[float, int]:
    """Returns seconds and output tokens.

    Raises:
        RuntimeError: a request failed, or no result came within `PATIENCE`.
    """
    started = heard = time.perf_counter()
    for number, (prompt, num_output) in enumerate(trace):
        manager.add_request(prompt, request_id=f"{name}-{number}", max_new_tokens=num_output)
    tokens = done = 0
    while done < len(trace):
        result = manager.get_result(timeout=1)
        if result is not None and result.is_finished():
            if result.error:
                raise RuntimeError(f"transformers: {result.error}")
            tokens, done, heard = tokens + len(result.generated_tokens), done + 1, time.perf_counter()
        elif time.perf_counter() - heard > PATIENCE or not manager.is_running():
            raise RuntimeError(f"transformers ended {done} of {len(trace)} requests and tells no more")
    return time.perf_counter() - started, tokens


def llama(setup: Setup) -> Any:
    """The shape as transformers describes it."""
    from transformers import LlamaConfig

    shape = setup.model
    return LlamaConfig(
        architectures=[shape.architecture], vocab_size=shape.vocab_size, hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size, num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads, num_key_value_heads=shape.num_kv_heads, head_dim=shape.head_dim,
        rms_norm_eps=shape.norm_eps, max_position_embeddings=shape.max_position_embeddings,
        tie_word_embeddings=False)


def _model(setup: Setup) -> Any:
    from transformers import AutoModelForCausalLM

    with torch.device("cuda" if setup.device == "cuda" else "cpu"):
        return AutoModelForCausalLM.from_config(
            llama(setup), dtype=setup.model.dtype, attn_implementation="sdpa").eval()


def _manager(setup: Setup, model: Any) -> Any:
    from transformers import GenerationConfig

    generation = GenerationConfig(max_new_tokens=64, do_sample=False, eos_token_id=-1, pad_token_id=0)
    if setup.device == "cuda":  # its default sizes, and its fastest settings
        return model.init_continuous_batching(generation_config=generation)
    from transformers import ContinuousBatchingConfig

    small = ContinuousBatchingConfig(num_blocks=32, max_batch_tokens=64)
    return model.init_continuous_batching(generation_config=generation, continuous_batching_config=small)


if __name__ == "__main__":
    main()
