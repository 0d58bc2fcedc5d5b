"""vLLM's CPU build, by its offline API: VLLM/bin/python benchmarks/peers/run_vllm.py CHECKPOINT."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator

from run_slotwise import Offline
from same_requests import CACHE_GIB, CONTEXT, SLOTS, Engine, main

VARIABLES = {"VLLM_CPU_KVCACHE_SPACE": str(CACHE_GIB), "VLLM_CPU_OMP_THREADS_BIND": f"0-{os.cpu_count() - 1}",
             "VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1"}


@contextlib.contextmanager
def start(asked: argparse.Namespace) -> Iterator[Engine]:
    os.environ.update({name: os.environ.get(name, value) for name, value in VARIABLES.items()})
    import vllm

    llm = vllm.LLM(model=asked.model, dtype="bfloat16", max_num_seqs=SLOTS, max_model_len=CONTEXT,
                   enable_prefix_caching=False)
    yield Offline("vllm", vllm.__version__, llm, vllm.SamplingParams)


if __name__ == "__main__":
    main(start, __doc__)
