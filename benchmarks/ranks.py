"""What several ranks cost: a step beside one process with as many threads, a plan on its way, a sum of 64 KB.

usage: python -m benchmarks.ranks step MODEL [--rows 1 8 64] [--prompt 512] [--rounds 5] [--stages 2] [--dtype NAME]
                                       [--quantization int8] | plan | sum
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable

import torch
from benchmarks.commands import bar, parser_of

from slotwise.compose.engine_builder import build_engine
from slotwise.compose.rank_messages import Known, RunShare, decode_order, encode
from slotwise.compute.kernels.cpu.kernels import CpuKernels
from slotwise.compute.kernels.cpu.shared_group import CHUNK, SharedGroup, SharedMemory, shared_file, size_of
from slotwise.compute.kernels.group import Group, TorchGroup
from slotwise.core.params import SamplingSpec
from slotwise.core.record import RowKind, StepPlan
from slotwise.core.request import RequestSpec
from slotwise.engine.config import EngineConfig
from slotwise.engine.engine import Engine
from slotwise.engine.ipc import BlockingChannel, pair
from slotwise.engine.messages import Add, Finish

PROMPT, STEPS, REPEATS = 64, 40, 300
ELEMENTS = 16_384  # float32: 64 KB


def step_ms(engine: Engine, rows: int) -> float:
    """Median milliseconds in which each of so many decode rows gets a token."""
    params = SamplingSpec(temperature=0.0, max_tokens=PROMPT + 2 * STEPS, ignore_eos=True)
    for row in range(rows):
        engine.handle(Add(row, RequestSpec([(7 * row + place) % 500 + 3 for place in range(PROMPT)], params)))
    times, before = [], 0
    while len(times) < STEPS:
        record = engine.step()
        if record.plan.counts and max(record.plan.counts) == 1:
            times.append((record.ended_ns - before) * 1e-6 * rows / len(record.plan.counts))
        before = record.ended_ns
    for row in range(rows):
        engine.handle(Finish(row, "abort"))
    while engine.has_work:
        engine.step()
    return statistics.median(times[5:])


def prompt_ms(engine: Engine, tokens: int) -> float:
    """Milliseconds to the first token of a prompt."""
    began = time.perf_counter()
    params = SamplingSpec(temperature=0.0, max_tokens=1, ignore_eos=True)
    prompt = [(11 * place) % 500 + 3 for place in range(tokens)]
    engine.handle(Add(0, RequestSpec(tuple(prompt), params, salt=str(began))))
    while engine.has_work:
        engine.step()
    return 1e3 * (time.perf_counter() - began)


def steps(asked: argparse.Namespace) -> dict[str, object]:
    """Pairs of one process with all threads and two ranks, or `stages`, that share them, in turn."""
    threads = torch.get_num_threads()

    def engine(width: int, stages: int = 1) -> Engine:
        torch.set_num_threads(threads)
        return build_engine(EngineConfig(
            model=asked.model, dtype=asked.dtype, quantization=asked.quantization, tensor_parallel_size=width,
            pipeline_parallel_size=stages, max_model_len=1024, kv_cache_memory=1 << 29))[0]

    one = engine(1)  # it keeps the threads that it was built with
    two = engine(1, asked.stages) if asked.stages > 1 else engine(2)
    measures: dict[str, Callable[[Engine], float]] = {
        f"{rows} rows": functools.partial(step_ms, rows=rows) for rows in asked.rows}
    measures |= {f"prompt of {tokens}": functools.partial(prompt_ms, tokens=tokens) for tokens in asked.prompt}
    return {"model": os.path.basename(asked.model), "dtype": asked.dtype, "quantization": asked.quantization,
            "stages": asked.stages, "threads": threads,
            "steps": {name: _pairs(measure, one, two, asked.rounds) for name, measure in measures.items()}}


def _pairs(measure: Callable[[Engine], float], one: Engine, two: Engine, rounds: int) -> dict[str, object]:
    measure(one), measure(two)  # graphs are captured
    pairs = [(measure(one), measure(two)) for _ in bar(range(rounds), "rounds")]
    ratios = sorted(second / first for first, second in pairs)
    return {"pairs_ms": [[round(each, 3) for each in pair] for pair in pairs],
            "ratio": round(statistics.median(ratios), 3), "range": [round(ratios[0], 3), round(ratios[-1], 3)]}


def plan_ms() -> dict[str, float]:
    """Milliseconds from a plan of 64 decode rows to its decoded copy at the other end of a socket."""
    rows = tuple(range(64))
    plan = StepPlan(1, 0.0, (), (), (), (), tuple(f"cmpl-{row:032x}" for row in rows), rows, (700,) * 64, (1,) * 64, (),
                    (1,) * 64, (RowKind.DECODE,) * 64, (), (), (), (), None)
    known = [Known(row, 700, (row + 1000,)) for row in rows]
    ours, theirs = map(BlockingChannel, pair())
    arrived: list[float] = []

    def receive() -> None:
        while len(arrived) < REPEATS:
            for message in theirs.receive(None):
                decode_order(message)
                arrived.append(time.perf_counter())

    receiver = threading.Thread(target=receive)
    receiver.start()
    times = []
    for number in range(REPEATS):
        started = time.perf_counter()
        ours.send(encode(RunShare(plan, known)))
        while len(arrived) <= number:
            time.sleep(1e-4)
        times.append(1e3 * (arrived[number] - started))
    receiver.join()
    return {"median_ms": statistics.median(times), "p99_ms": sorted(times)[-REPEATS // 100]}


def sum_ms(group: Group) -> float:
    """Median milliseconds of a sum of 64 KB."""
    x, times = torch.ones(1, ELEMENTS), []
    for _ in range(REPEATS):
        started = time.perf_counter()
        group.all_reduce(x)
        times.append(time.perf_counter() - started)
    return 1e3 * statistics.median(times)


def sums() -> dict[str, float]:
    """Through shared memory and through gloo, between this process and a fork of it."""
    torch.set_num_threads(1)
    memory = SharedMemory(shared_file(size_of(2, CHUNK)), 2)
    SharedGroup(CpuKernels(1).launcher, memory, 0).warm_up(torch.float32)
    is_other = os.fork() == 0
    shared = sum_ms(SharedGroup(CpuKernels(1).launcher, memory, int(is_other)))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.distributed.init_process_group(
        "gloo", init_method="tcp://127.0.0.1:29511", rank=int(is_other), world_size=2)
    gloo = sum_ms(TorchGroup())
    if is_other:
        os._exit(0)
    return {"shared_memory_ms": shared, "gloo_ms": gloo}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("what", choices=("step", "plan", "sum"), help="a step, a plan on its way, or a sum of 64 KB")
    parser.add_argument("model", nargs="?", default="", help="a checkpoint's folder")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 64], help="rows of a step")
    parser.add_argument("--prompt", type=int, nargs="*", default=[512], help="tokens")
    parser.add_argument("--quantization", default="none", help="of the weights: none, int8 or int4")
    parser.add_argument("--rounds", type=int, default=5, help="rounds, in each of which both run")
    parser.add_argument("--dtype", default="bfloat16", help="of the weights")
    parser.add_argument("--stages", type=int, default=1,
                        help="stages of the pipeline; 1: two ranks divide each layer")
    asked = parser.parse_args()
    measures: dict[str, Callable[[], object]] = {
        "plan": plan_ms, "sum": sums, "step": lambda: steps(asked)}
    found = measures[asked.what]()
    json.dump(found, sys.stdout, indent=2)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
