"""Two ranks on two devices give the tokens of one, by NCCL; in a rehearsal two processes of plain torch, by gloo."""

from __future__ import annotations

import importlib.util
import statistics
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from benchmarks.gpu.figures import tell
from benchmarks.gpu.setup import Setup, asked

from slotwise import builtin
from slotwise.compose.engine_builder import build_engine
from slotwise.core.params import SamplingSpec
from slotwise.core.request import RequestSpec
from slotwise.engine.config import EngineConfig
from slotwise.engine.messages import Add

RANKS, ROWS, PROMPT, TOKENS = 2, 8, 40, 32
PACKAGE = "msgspec"  # by which ranks talk
GREEDY = SamplingSpec(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)


class Found(NamedTuple):
    """What an engine gave."""

    tokens: dict[int, list[int]]
    step_seconds: float  # the median step in which every row decodes


def main() -> None:
    setup = asked(__doc__)
    if why := _obstacle(setup):
        tell(ranks={"skipped": why})
        return
    alone, together = run(setup, 1), run(setup, RANKS)
    others = [row for row, tokens in alone.tokens.items() if tokens != together.tokens[row]]
    tell(ranks={"ranks": RANKS, "by": "nccl" if setup.device == "cuda" else "gloo", "requests": ROWS,
                "with_the_same_tokens": ROWS - len(others), "step_seconds": together.step_seconds,
                "step_seconds_of_one": alone.step_seconds})
    if others:
        raise RuntimeError(f"on {RANKS} ranks other tokens than on one: requests {', '.join(map(str, others))}")


def _obstacle(setup: Setup) -> str:
    """Why the part cannot run; empty where it can."""
    if importlib.util.find_spec(PACKAGE) is None:
        return f"{PACKAGE} is not installed"
    if setup.device == "cuda" and torch.cuda.device_count() < RANKS:
        return f"{torch.cuda.device_count()} GPU: {RANKS} ranks need as many"
    return ""


def run(setup: Setup, ranks: int) -> Found:
    """Runs the same requests with the built-in model in float32.

    Raises:
        RuntimeError: a step failed.
    """
    engine, _ = build_engine(EngineConfig.of(
        model=str(Path(builtin.__file__).parent), device=setup.device, dtype="float32", max_num_seqs=ROWS,
        max_model_len=256, kv_cache_memory=64 << 20, tensor_parallel_size=ranks, overlap=0))
    for row in range(ROWS):
        prompt = [10 + (7 * row + 3 * place) % 400 for place in range(PROMPT + row)]
        engine.handle(Add(row, RequestSpec(prompt, GREEDY, row)))
    tokens: dict[int, list[int]] = {row: [] for row in range(ROWS)}
    ends: list[int] = []  # of steps in which every row decodes, nanoseconds
    while engine.has_work:
        record = engine.step()
        if record.outcome.failure:
            raise RuntimeError(record.outcome.failure)
        for row, sampled in zip(record.plan.request_ids, record.tokens, strict=True):
            tokens[row] += sampled
        if record.plan.counts == (1,) * ROWS:
            ends.append(record.ended_ns)
    return Found(tokens, statistics.median(after - before for before, after in pairwise(ends)) * 1e-9)


if __name__ == "__main__":
    main()
