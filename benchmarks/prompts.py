"""Times prompts of one request: Slotwise and transformers with the same weights, and the machine's roofline.

Both compute a prompt of random tokens and its last logits on all cores, each in a process of its own; their rounds take
turns.  transformers runs as in its own `generate`: with a cache, and logits of the last token alone.  The roofline
counts the weights' bytes and the operations of products and attention, not those of states.  Its rates are the mean of
measurements right before and after each round.

    python -m benchmarks.checkpoint FOLDER --shape granite-4-h-350m
    python -m benchmarks.prompts FOLDER ... --dtype bfloat16 float32 --output prompts-cpu.json
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.commands import parser_of

ROOT = Path(__file__).parents[1]
SLOTWISE, TRANSFORMERS = "slotwise", "transformers"
ENGINES = (SLOTWISE, TRANSFORMERS)
MARGIN = 64  # positions behind the longest prompt

Measured = tuple[float, float]
"""Seconds of a prompt, and of its bound; 0 where an engine knows no bound."""
Read = Callable[[list[int]], Measured]


def _slotwise(folder: str, dtype: str, longest: int) -> tuple[Read, str]:
    from benchmarks.decode.steps import mean

    from slotwise.compose.engine_builder import load
    from slotwise.core.params import SamplingSpec
    from slotwise.core.request import RequestSpec
    from slotwise.engine.config import EngineConfig
    from slotwise.engine.messages import Add
    from slotwise.measure.bench.profiler import cost_of
    from slotwise.version import __version__

    config = EngineConfig.of(model=folder, dtype=dtype, max_num_seqs=1, enable_prefix_caching=False, max_stall_ms=0,
                             max_model_len=longest + MARGIN)
    loaded = load(config)
    engine, _ = loaded.engine(config)
    params = SamplingSpec(temperature=0.0, max_tokens=1, ignore_eos=True)

    def read(prompt: list[int]) -> Measured:
        before, records = loaded.measure_machine(), []
        began = time.perf_counter()
        engine.handle(Add(1, RequestSpec(prompt, params, 0)))
        while engine.has_work:
            records.append(engine.step())
        seconds = time.perf_counter() - began
        roofline = loaded.roofline(mean(before, loaded.measure_machine()))
        return seconds, sum(roofline.seconds(cost_of(record, roofline)) for record in records if record.plan.counts)

    return read, __version__


def _transformers(folder: str, dtype: str, longest: int) -> tuple[Read, str]:
    import torch
    import transformers

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()

    def read(prompt: list[int]) -> Measured:
        tokens = torch.tensor([prompt])
        began = time.perf_counter()
        with torch.inference_mode():
            model(tokens, use_cache=True, logits_to_keep=1)
        return time.perf_counter() - began, 0.0

    return read, transformers.__version__


MAKERS = {SLOTWISE: _slotwise, TRANSFORMERS: _transformers}


def work(engine: str, folder: str, dtype: str, longest: int) -> None:
    """Reads one line of JSON for each prompt, its token ids, and answers with seconds."""
    with open(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # libraries print to stderr: stdout carries the answers
        read, version = MAKERS[engine](folder, dtype, longest)
        print(json.dumps(version), file=answers, flush=True)
        for line in sys.stdin:
            print(json.dumps(read(json.loads(line))), file=answers, flush=True)


class Worker:
    """A process with one engine, which runs only while it is asked."""

    def __init__(self, engine: str, folder: str, dtype: str, longest: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.prompts", folder, "--worker", engine, "--dtype", dtype,
             "--tokens", str(longest)],
            env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}, text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        self.version: str = self._answer()

    def measure(self, prompt: list[int]) -> Measured:
        """Seconds of a prompt, and of its bound."""
        assert self._process.stdin is not None
        print(json.dumps(prompt), file=self._process.stdin, flush=True)
        seconds, bound = self._answer()
        return seconds, bound

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise RuntimeError(f"{' '.join(map(str, self._process.args))} ended")  # type: ignore[arg-type]
        return json.loads(line)


@contextmanager
def workers(folder: str, dtype: str, longest: int) -> Iterator[dict[str, Worker]]:
    """Yields a worker for each engine."""
    started: dict[str, Worker] = {}
    try:
        for engine in ENGINES:
            started[engine] = Worker(engine, folder, dtype, longest)
        yield started
    finally:
        for worker in started.values():
            worker.close()


def measure(folder: Path, dtype: str, tokens: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """Returns a row for each length."""
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    draw, rows = random.Random(0), []
    with workers(str(folder), dtype, max(tokens)) as engines:
        for length in tokens:
            prompts = [[draw.randrange(10, vocabulary) for _ in range(length)] for _ in range(1 + rounds)]
            found: dict[str, list[Measured]] = {engine: [] for engine in ENGINES}
            for prompt in prompts:
                for engine, worker in engines.items():
                    found[engine].append(worker.measure(prompt))
            for each in found.values():
                del each[0]  # which warmed up
            seconds = {engine: [taken for taken, _ in each] for engine, each in found.items()}
            bounds = [bound for _, bound in found[SLOTWISE]]
            rows.append({"model": folder.name, "dtype": dtype, "tokens": length, "seconds": seconds, "bound": bounds,
                         "versions": {engine: worker.version for engine, worker in engines.items()}})
            ours, theirs = (statistics.median(seconds[engine]) for engine in ENGINES)
            over = statistics.median(taken / bound for taken, bound in zip(seconds[SLOTWISE], bounds, strict=True))
            print(f"{folder.name:<20}{dtype:<10}{length:>6} tokens: {length / ours:>7,.0f} tokens/s, "
                  f"{over:.2f} times the bound, {theirs / ours:.2f} times as fast as transformers", file=sys.stderr,
                  flush=True)
    return rows


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("models", type=Path, nargs="+", metavar="FOLDER", help="folders of checkpoints")
    parser.add_argument("--dtype", nargs="+", choices=("bfloat16", "float32"), default=["bfloat16"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 1024, 2048], help="lengths of prompts")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", help="file in benchmarks/results, to which rows are added")
    parser.add_argument("--worker", choices=ENGINES, help="for the benchmark's own processes")
    asked = parser.parse_args()
    if asked.worker:
        work(asked.worker, str(asked.models[0]), asked.dtype[0], max(asked.tokens))
        return
    for folder in asked.models:
        for dtype in asked.dtype:
            rows = measure(folder.resolve(), dtype, asked.tokens, asked.rounds)
            if asked.output:
                keep(ROOT / "benchmarks" / "results" / asked.output, rows)


def keep(file: Path, rows: list[dict[str, Any]]) -> None:
    """Adds rows to a file, in place of those of the same prompts."""
    from slotwise.measure.bench.results import environment, write_json

    def prompt(row: dict[str, Any]) -> tuple[Any, ...]:
        return row["model"], row["dtype"], row["tokens"]

    again = set(map(prompt, rows))
    before = json.loads(file.read_text())["prompts"] if file.exists() else []
    kept = [row for row in before if prompt(row) not in again] + [row | {"environment": environment()} for row in rows]
    write_json(file, {"prompts": sorted(kept, key=prompt)})


if __name__ == "__main__":
    main()
