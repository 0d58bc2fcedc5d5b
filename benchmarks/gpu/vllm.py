"""Runs the same trace through vLLM's offline API, on the same shape with random weights.

In a rehearsal Slotwise's own `LLM`, which has the same API, stands in for it, with the built-in model.
"""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.gpu.figures import tell
from benchmarks.gpu.peer import WARM_UP, llama
from benchmarks.gpu.setup import Setup, asked
from benchmarks.gpu.trace import requests


def main() -> None:
    setup = asked(__doc__)
    if setup.device == "cuda" and importlib.util.find_spec("vllm") is None:
        tell(vllm={"skipped": "vllm is not installed"})
        return
    trace = list(requests(setup))
    with TemporaryDirectory() as folder:
        llm, params = _vllm(setup, folder) if setup.device == "cuda" else _stand_in(setup)
        run(llm, params, trace[:WARM_UP])
        seconds, tokens = run(llm, params, trace)
    tell(vllm={"requests": len(trace), "output_tokens": tokens, "seconds": seconds,
               "output_tokens_per_second": tokens / seconds})


def run(llm: Any, params: Any, trace: list[tuple[list[int], int]]) -> tuple[float, int]:
    """Returns seconds and output tokens.

    Raises:
        RuntimeError: fewer tokens came than were asked for.
    """
    prompts = [{"prompt_token_ids": prompt} for prompt, _ in trace]
    wanted = [params(temperature=0.0, max_tokens=num_output, ignore_eos=True) for _, num_output in trace]
    started = time.perf_counter()
    answers = llm.generate(prompts, wanted, use_tqdm=False)
    seconds = time.perf_counter() - started
    tokens = sum(len(answer.outputs[0].token_ids) for answer in answers)
    if tokens != sum(num_output for _, num_output in trace):
        raise RuntimeError(f"{tokens} tokens came of a trace of {sum(num_output for _, num_output in trace)}")
    return seconds, tokens


def _vllm(setup: Setup, folder: str) -> tuple[Any, Any]:
    """Its default sizes and its fastest settings; weights are made on the device."""
    import vllm

    llama(setup).save_pretrained(folder)
    llm = vllm.LLM(
        model=folder, load_format="dummy", skip_tokenizer_init=True,
        dtype=str(setup.model.dtype).removeprefix("torch."),
        max_num_seqs=max(setup.rows), max_model_len=setup.longest, enable_prefix_caching=False)
    return llm, vllm.SamplingParams


def _stand_in(setup: Setup) -> tuple[Any, Any]:
    import slotwise
    from slotwise import builtin

    llm = slotwise.LLM(
        model=str(Path(builtin.__file__).parent), device=setup.device, dtype="float32",
        max_num_seqs=max(setup.rows), max_model_len=setup.longest, enable_prefix_caching=False)
    return llm, slotwise.SamplingParams


if __name__ == "__main__":
    main()
