"""The requests that every engine is measured on, and what is measured: output tokens per second, and decode steps.

A script of this folder calls `main` with how its engine starts.  It runs in that engine's environment, which has only
Slotwise's workloads, from this checkout, and the standard library.  It prints a line of JSON per figure:

    {"engine", "version", "model", "measure": "mixed:91", "value"}

    mixed:SEED   64 requests at once with log-normal prompts (median 128, sigma 0.9, at most 1,024) and outputs (median
                 64, sigma 0.9, at most 512), random token ids, greedy, end tokens ignored: output tokens per second
    azure:SEED   the same with lengths of the Azure conversation trace of 2023, an eighth of them
    step:ROWS    milliseconds of a decode step of so many streams behind prompts of 128 tokens: the difference of runs
                 of 65 tokens and of 1, over 64 steps, so that prompts cancel; the least of three of each
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

SOURCE = Path(__file__).parents[2] / "src"
if str(SOURCE) not in sys.path:
    sys.path.append(str(SOURCE))  # behind what is installed or named, so that another version can be measured, too

from slotwise.measure.workload.distributions import parse_arrivals, parse_lengths  # noqa: E402
from slotwise.measure.workload.workloads import Recipe, Workload, generate  # noqa: E402

SHAPES = {
    "mixed": ("lognormal:128:0.9:1024", "lognormal:64:0.9:512"),
    "azure": ("azure-prompt:0.125", "azure-output:0.125"),
}
VOCABULARY = 4000  # prompts are random ids below it
SLOTS, CONTEXT = 64, 2048
STEPS, STEP_TURNS = 64, 3
CACHE_GIB = 4
MEASURES = ("mixed:91", "mixed:92", "step:1", "step:8", "step:64")


class Engine(Protocol):
    """A started engine, with room for `SLOTS` sequences of `CONTEXT` tokens and without a prefix cache."""

    name: str
    version: str

    def generate(self, prompts: list[list[int]], lengths: list[int]) -> int:
        """Answers all prompts, each with so many tokens, greedily.  Returns the number of tokens that came."""


def workload(name: str, count: int) -> Workload:
    """Returns the workload named `name`.  Raises ValueError for an unknown name."""
    kind, _, seed = name.partition(":")
    if kind not in SHAPES or not seed.isdigit():
        raise ValueError(f"a workload is {' or '.join(SHAPES)}, a colon and a seed, not {name!r}")
    inputs, outputs = SHAPES[kind]
    return generate(Recipe(count, parse_lengths(inputs), parse_lengths(outputs), parse_arrivals("at-once")), int(seed))


def seconds_of(engine: Engine, work: Workload) -> tuple[float, int]:
    """Returns the seconds of all requests, and their output tokens.  Raises SystemExit where tokens are missing."""
    lengths = [request.num_output for request in work.requests]
    prompts = [work.prompt_ids(request, VOCABULARY) for request in work.requests]
    began = time.perf_counter()
    tokens = engine.generate(prompts, lengths)
    seconds = time.perf_counter() - began
    if tokens != sum(lengths):
        raise SystemExit(f"{engine.name} gave {tokens} tokens, and {sum(lengths)} were requested")
    return seconds, tokens


def step_ms(engine: Engine, rows: int) -> float:
    def seconds(tokens: int, number: int) -> float:
        recipe = Recipe(rows, parse_lengths("fixed:128"), parse_lengths(f"fixed:{tokens}"), parse_arrivals("at-once"))
        return seconds_of(engine, generate(recipe, number))[0]

    first, whole = (min(seconds(tokens, 10 * tokens + turn) for turn in range(STEP_TURNS)) for tokens in (1, STEPS + 1))
    return 1e3 * (whole - first) / STEPS


def measured(engine: Engine, measure: str, requests: int) -> float:
    kind, _, number = measure.partition(":")
    if kind == "step":
        return step_ms(engine, int(number))
    seconds, tokens = seconds_of(engine, workload(measure, requests))
    return tokens / seconds


def main(
    start: Callable[[argparse.Namespace], AbstractContextManager[Engine]], description: str | None,
    add_options: Callable[[argparse.ArgumentParser], object] = lambda parser: None,
) -> None:
    """Starts an engine and prints the measures that the command line names."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="what the engine loads")
    parser.add_argument("--measures", nargs="+", default=list(MEASURES), metavar="MEASURE",
                        help="mixed:SEED, azure:SEED or step:ROWS")
    parser.add_argument("--requests", type=int, default=64, help="requests of a workload")
    add_options(parser)
    asked = parser.parse_args()
    with start(asked) as engine:
        seconds_of(engine, workload("mixed:999", 2))  # not counted
        for measure in asked.measures:
            print(json.dumps({"engine": engine.name, "version": engine.version, "model": Path(asked.model).name,
                              "measure": measure, "value": round(measured(engine, measure, asked.requests), 3)}),
                  flush=True)
