"""What a what-if costs the streams beside it: a real server over HTTP, windows with a question and without in turn.

    traffic, which fills the ring      window without    window with     window without    window with ...
    ├──────── --fill seconds ────────┤ streams           streams, and POST /what_if once

Streams decode in every window, each from a new prompt.  A gap is the time between two events of a stream; those of the
time that the question took count, and in the window without one those of as long a time.

usage: python -m benchmarks.simulator what_if MODEL --trace CSV --json FILE      (six minutes; nothing else may run)
"""

from __future__ import annotations

import argparse
import asyncio
import math
import statistics
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
from benchmarks.commands import bar, parser_of
from benchmarks.server import serving

from slotwise.measure.bench.load_generator import BenchTarget, Phrasing, measure, resolve
from slotwise.measure.bench.results import environment, write_json
from slotwise.measure.workload.distributions import Poisson
from slotwise.measure.workload.trace import read_trace, replay

KEY = "operator"
SCALE = 0.125  # of the trace's lengths
SETTLING = 2.0  # seconds of a window before the question: the streams' prompts run
QUESTION = {"changes": {"scheduling_policy": "shortest"}, "ttft_ms": 1000}
PROMPT, LONGEST = 16, 4000  # tokens of a stream


async def stream(session: aiohttp.ClientSession, number: int, stop: asyncio.Event) -> list[float]:
    """Returns the times of a stream's events until `stop`."""
    body = {"prompt": [10 + (number * 37 + place) % 1000 for place in range(PROMPT)], "stream": True,
            "ignore_eos": True, "temperature": 0, "max_tokens": LONGEST}
    times = []
    async with session.post("/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if line.startswith(b"data: {"):
                times.append(time.monotonic())
            if stop.is_set():
                return times
    raise RuntimeError("a stream ended before its window: LONGEST is too small")


async def ask(session: aiohttp.ClientSession) -> dict[str, Any]:
    async with session.post("/what_if", json=QUESTION, headers={"Authorization": f"Bearer {KEY}"}) as response:
        response.raise_for_status()
        answer: dict[str, Any] = await response.json()
    return answer


async def window(url: str, first: int, streams: int, quiet: float) -> dict[str, Any]:
    """One window.

    Args:
        quiet: seconds of a window without a question; 0: there is one, which says how long it is.
    """
    stop = asyncio.Event()
    answer: dict[str, Any] = {}
    async with aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(180)) as session:
        tasks = [asyncio.create_task(stream(session, first + number, stop)) for number in range(streams)]
        await asyncio.sleep(SETTLING)
        begin = time.monotonic()
        if quiet:
            await asyncio.sleep(quiet)
        else:
            answer = await ask(session)
        end = time.monotonic()
        stop.set()
        times = await asyncio.gather(*tasks)
    gaps = sorted(later - sooner for each in times for sooner, later in pairwise(each)
                  if begin <= sooner and later <= end)
    found = {"seconds": end - begin, "gaps": len(gaps), "median_ms": 1e3 * statistics.median(gaps),
             "p99_ms": 1e3 * gaps[math.ceil(0.99 * len(gaps)) - 1], "worst_ms": 1e3 * gaps[-1]}
    return found | ({"traffic_seconds": answer["seconds"], "traffic_requests": answer["requests"]} if answer else {})


def pairs_of(url: str, asked: argparse.Namespace) -> list[dict[str, Any]]:
    """Each pair begins with the window that the one before has ended with."""
    found: list[dict[str, Any]] = []
    seconds = asyncio.run(window(url, 0, asked.streams, 0.0))["seconds"]  # not kept: sizes of steps that were not met
    for number in bar(range(asked.pairs), "pairs"):
        pair: dict[str, Any] = {}
        for is_asked in (False, True) if number % 2 else (True, False):
            first = asked.streams * (1 + 2 * number + is_asked)
            pair["with" if is_asked else "without"] = one = asyncio.run(
                window(url, first, asked.streams, 0.0 if is_asked else seconds))
            seconds = one["seconds"]
        found.append(pair)
    return found


def filled(url: str, asked: argparse.Namespace) -> None:
    """Sends conversations for `asked.fill` seconds, so that the ring holds them."""
    target, vocab_size = resolve(BenchTarget(url))
    count = max(1, round(asked.rate * asked.fill))
    workload = replay(read_trace(asked.trace, SCALE, limit=count), Poisson(asked.rate), seed=3)
    measure(target, workload, Phrasing(vocab_size, hidden_lengths=True), num_warmups=2)


def ratios(pairs: Sequence[dict[str, Any]], name: str) -> list[float]:
    return [pair["with"][name] / pair["without"][name] for pair in pairs]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("model", help="a checkpoint's folder")
    parser.add_argument("--trace", type=Path, required=True, help="the Azure conversation trace, or another CSV")
    parser.add_argument("--fill", type=float, default=200.0, help="seconds of traffic before the first window")
    parser.add_argument("--rate", type=float, default=4.0, help="of its requests a second")
    parser.add_argument("--streams", type=int, default=4, help="streams that decode")
    parser.add_argument("--pairs", type=int, default=6, help="pairs of runs")
    parser.add_argument("--json", required=True, help="write the figures here")
    asked = parser.parse_args()
    with serving(asked.model, "--admin-api-key", KEY) as server:
        filled(server.url, asked)
        pairs = pairs_of(server.url, asked)
    for pair in pairs:
        one, other = pair["with"], pair["without"]
        print(f"{one['traffic_requests']} requests in {one['traffic_seconds']:.0f} s of traffic answered in "
              f"{one['seconds']:.1f} s; p99 gap {one['p99_ms']:.1f} ms, without {other['p99_ms']:.1f}")
    p99 = ratios(pairs, "p99_ms")
    print(f"p99 gap with a question over without: {statistics.geometric_mean(p99):.3f} in the mean, "
          f"{min(p99):.3f} to {max(p99):.3f}")
    write_json(asked.json, {
        "version": 1, "environment": environment(), "trace": asked.trace.name, "length_scale": SCALE,
        "rate": asked.rate, "streams": asked.streams, "pairs": pairs,
        "p99_ratio": statistics.geometric_mean(p99),
        "median_ratio": statistics.geometric_mean(ratios(pairs, "median_ms"))})
