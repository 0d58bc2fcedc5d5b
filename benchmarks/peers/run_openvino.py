"""OpenVINO GenAI's continuous batching: OPENVINO/bin/python benchmarks/peers/run_openvino.py EXPORTED.

It computes in bfloat16 where the processor has instructions for it, whatever the format of the weights.  Export with

    optimum-cli export openvino --model CHECKPOINT --task text-generation-with-past --weight-format fp16 EXPORTED

or --weight-format int8.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from typing import Any

from same_requests import CACHE_GIB, SLOTS, Engine, main

BATCHED_TOKENS = 2048


class OpenVino:
    name = "openvino"

    def __init__(self, model: str) -> None:
        import openvino_genai

        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size, scheduler.max_num_seqs = CACHE_GIB, SLOTS
        scheduler.max_num_batched_tokens, scheduler.dynamic_split_fuse = BATCHED_TOKENS, True
        scheduler.enable_prefix_caching = False
        self.version = openvino_genai.__version__
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU", {})

    def generate(self, prompts: list[list[int]], lengths: list[int]) -> int:
        import numpy
        import openvino

        ids = [openvino.Tensor(numpy.array([prompt], dtype=numpy.int64)) for prompt in prompts]
        answers = self._pipeline.generate(ids, [_greedy(length) for length in lengths])
        return sum(len(answer.m_generation_ids[0]) for answer in answers)


def _greedy(length: int) -> Any:
    import openvino_genai

    config = openvino_genai.GenerationConfig()
    config.max_new_tokens, config.ignore_eos, config.do_sample = length, True, False
    return config


@contextlib.contextmanager
def start(asked: argparse.Namespace) -> Iterator[Engine]:
    yield OpenVino(asked.model)


if __name__ == "__main__":
    main(start, __doc__)
