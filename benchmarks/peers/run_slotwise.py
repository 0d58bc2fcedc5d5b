"""Slotwise, by its offline API: python benchmarks/peers/run_slotwise.py MODEL [--quantization int8]."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from typing import Any

from same_requests import CONTEXT, SLOTS, Engine, main


class Offline:
    """An `LLM` of vLLM's interface."""

    def __init__(self, name: str, version: str, llm: Any, params: Any) -> None:
        self.name, self.version = name, version
        self._llm, self._params = llm, params

    def generate(self, prompts: list[list[int]], lengths: list[int]) -> int:
        asked = [self._params(temperature=0, ignore_eos=True, max_tokens=length) for length in lengths]
        answers = self._llm.generate([{"prompt_token_ids": ids} for ids in prompts], asked, use_tqdm=False)
        return sum(len(answer.outputs[0].token_ids) for answer in answers)


@contextlib.contextmanager
def start(asked: argparse.Namespace) -> Iterator[Engine]:
    import slotwise

    settings = dict(setting.split("=", 1) for setting in asked.set)
    llm = slotwise.LLM(
        model=asked.model, dtype="bfloat16", quantization=asked.quantization, max_num_seqs=SLOTS,
        max_model_len=CONTEXT, enable_prefix_caching=False, **settings)
    yield Offline("slotwise", slotwise.__version__, llm, slotwise.SamplingParams)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quantization", help="int8 or int4")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="more settings")


if __name__ == "__main__":
    main(start, __doc__, add_options)
