"""Scenario with five times the server's capacity."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvloop

from slotwise.bench.load_generator import BenchTarget, LoadRun, Phrasing, resolve
from slotwise.bench.measures import COMPLETED, REJECTED, RequestOutcome, percentile
from slotwise.workload.distributions import parse_arrivals, parse_lengths
from slotwise.workload.workloads import Recipe, Workload, generate

from . import clients, ledger
from .lean import LeanClient
from .server import MIB, Server, serving

FACTOR = 5
TRIAL = 10.0  # seconds of each closed loop that measures the best goodput
USERS = (64, 96)  # of the closed loops; there are 64 slots
INPUTS, OUTPUTS = parse_lengths("uniform:32:256"), parse_lengths("uniform:64:256")
MEAN_OUTPUT = 160  # tokens
RAMP = 0.2  # share of a run before which its goodput is not counted
GOOD = 0.9  # of the best goodput
FLAT = 0.03  # share of memory growth, from the first quarter to the end, that counts as none
AT_ONCE = 20.0  # milliseconds
DRAIN = 120.0  # seconds for the queue to drain


def requests(pattern: str, count: int, seed: int) -> Workload:
    return generate(Recipe(count, INPUTS, OUTPUTS, parse_arrivals(pattern)), seed)


def drive(target: BenchTarget, workload: Workload, phrasing: Phrasing, limit: float) -> list[RequestOutcome]:
    """Returns the outcomes of `workload` within `limit` seconds; active requests are aborted then."""
    load = LoadRun(workload, lambda request: phrasing.body(target, workload, request))
    replies: list[RequestOutcome] = []

    async def run() -> None:
        client = LeanClient(target, load.clock)

        async def send(body: bytes, reply: RequestOutcome) -> None:
            replies.append(reply)
            await client.complete(body, reply)

        with contextlib.closing(client), contextlib.suppress(TimeoutError):
            await asyncio.wait_for(load.run(send), limit)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # the cores are the server's
        runner.run(run())
    return replies


def goodput(outcomes: Sequence[RequestOutcome], seconds: float) -> float:
    """Returns output tokens per second in the steady part of a run, of requests that are not refused.

    An event may contain several tokens; the mean is taken from completed responses.
    """
    whole = [outcome for outcome in outcomes if outcome.status == COMPLETED]
    events = sum(len(outcome.token_times) for outcome in whole)
    per_event = sum(outcome.num_output for outcome in whole) / events if events else 0.0
    began = RAMP * seconds
    steady = sum(began <= at < seconds for outcome in outcomes for at in outcome.token_times)
    return steady * per_event / (seconds - began)


def closed_loops(target: BenchTarget, phrasing: Phrasing) -> dict[int, float]:
    """Returns goodput by the number of users, each of which sends a request after the last response."""
    found = {}
    for users in USERS:
        outcomes = drive(target, requests(f"closed:{users}", 60 * users, seed=users), phrasing, TRIAL)
        found[users] = goodput(outcomes, TRIAL)
        print(f"    {users} users in a closed loop: {found[users]:,.0f} tokens/s", flush=True)
        time.sleep(1.0)
    return found


def best(before: dict[int, float], after: dict[int, float]) -> float:
    """Returns the best closed loop, each the mean of its two runs, because a shared machine's speed varies."""
    return max((before[users] + after[users]) / 2 for users in USERS)


class MemoryWatch:
    """Memory of all processes at five times of a run, including start and end."""

    def __init__(self, server: Server, seconds: float) -> None:
        self._server = server
        self._readings: list[int] = []
        self._thread = threading.Thread(target=self._read, args=(seconds,), daemon=True)
        self._thread.start()

    def _read(self, seconds: float) -> None:
        began = time.perf_counter()
        for share in (0.0, 0.25, 0.5, 0.75, 1.0):
            time.sleep(max(0.0, began + share * seconds - time.perf_counter()))
            self._readings.append(self._server.memory())

    def readings(self) -> list[int]:
        self._thread.join()
        return self._readings


def stolen() -> list[int]:
    """Returns the ticks stolen by the host of this machine, and all ticks; zeros where they are not counted."""
    try:
        ticks = list(map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]))
    except OSError:
        return [0, 1]
    return [ticks[7], sum(ticks)]


def latencies(milliseconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(milliseconds)
    return {"count": len(ordered), "p50": percentile(ordered, 50), "p99": percentile(ordered, 99),
            "max": max(ordered, default=0.0)}


def fate(outcome: RequestOutcome) -> str:
    """Maps the load generator's outcomes to fates; a broken stream counts as lost."""
    if outcome.status == COMPLETED:
        return ledger.COMPLETED
    if outcome.status == REJECTED:
        return ledger.REFUSED if outcome.error.startswith("503") else ledger.IMPOSSIBLE
    return ledger.FAILED if outcome.error[:3].isdigit() else ledger.LOST


def overload(seconds: float) -> ledger.Row:
    """Runs an open loop at five times the capacity, and drains its queue before accounting."""
    with serving() as server:
        target, vocab_size = resolve(BenchTarget(server.url))
        phrasing = Phrasing(vocab_size)
        before = closed_loops(target, phrasing)
        rate = FACTOR * max(before.values()) / MEAN_OUTPUT
        print(f"    open loop: {rate:.0f} requests/s for {seconds:g} s", flush=True)
        workload = requests(f"poisson:{rate:.2f}", max(2, int(rate * seconds)), seed=1)
        memory = MemoryWatch(server, seconds)
        probe = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.reliability.probe", server.url, str(server.process.pid),
             str(seconds)],
            stdout=subprocess.PIPE, text=True)
        began = stolen()
        outcomes = drive(target, workload, phrasing, seconds + DRAIN)
        taken, ticks = (after - before for after, before in zip(stolen(), began, strict=True))
        probed = json.loads(probe.communicate()[0])
        most = best(before, closed_loops(target, phrasing))
        row = asyncio.run(_account(server, most, seconds, outcomes, probed, memory.readings()))
        row.seen.append(f"the host took {taken / max(1, ticks):.1%} of this machine's processors for others")
        return row


async def _account(server: Server, most: float, seconds: float, outcomes: list[RequestOutcome],
                   probed: dict[str, Any], memory: list[int]) -> ledger.Row:
    async with clients.session() as http:
        await clients.quiet(http, server)
        leaked = await clients.leaked(http, server)
    share = goodput(outcomes, seconds) / most
    offered = sum(outcome.due <= seconds for outcome in outcomes) / seconds * MEAN_OUTPUT / most
    crowd = latencies([1000 * outcome.e2el for outcome in outcomes if fate(outcome) == ledger.REFUSED])
    alone, computing = latencies(probed["refused_ms"]), latencies(probed["computing_ms"])
    late = latencies([1000 * (outcome.sent - outcome.due) for outcome in outcomes])
    why = Counter(outcome.error for outcome in outcomes if fate(outcome) == ledger.LOST)
    return ledger.Row(
        f"{offered:.1f}-fold overload, {seconds:g} s", ledger.tally([*map(fate, outcomes), *probed["fates"]]), leaked,
        {"goodput within 10% of the best": share >= GOOD,
         "memory flat once queue and log are full": ledger.drift(memory[1], memory[-1]) <= FLAT,
         "each refusal costs under 20 ms of computing": 0 < computing["max"] < AT_ONCE,
         "each refusal reaches its client within 20 ms": 0 < alone["max"] < AT_ONCE},
        [f"{len(outcomes) / seconds:.0f} requests/s; goodput {share:.0%} of the best ({most:,.0f} output tokens/s)",
         "memory " + ", ".join(f"{reading / MIB:.0f}" for reading in memory) + " MiB at the start and after each "
         "quarter (a queue that fills holds its requests, and the log its latest steps)",
         f"refusals, p50 / p99 / max: {_written(computing)} of the API process' computing, {_written(alone)} until a "
         f"client of its own has one ({alone['count']:,}), {_written(crowd)} until the load generator has "
         f"({crowd['count']:,})", *(f"lost: {count} × {error}" for error, count in why.most_common())],
        {"best_tokens_per_second": most, "offered": offered, "goodput_share": share,
         "memory_rss": memory,
         "refusal_ms": alone, "refusal_computing_ms": computing, "refusal_ms_load_generator": crowd,
         "load_generator_late_ms": late})


def _written(spread: dict[str, float]) -> str:
    return f"{spread['p50']:.1f} / {spread['p99']:.1f} / {spread['max']:.1f} ms"
