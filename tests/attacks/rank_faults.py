"""Kills or freezes a random rank at random moments under load.

Clients stream greedy requests to a server of the built-in model without a pause, and know what each must say.  A stream
that is disturbed must end once, with an error, and what it said before must be the beginning of that.  The server is a
new one after every few faults, because its supervisor pauses longer before each start that follows soon on another.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from benchmarks.server import Server, children, serving

from attacks import clients, ledger
from attacks.clients import Answer, ask
from attacks.processes import command

CLIENTS = 8  # of a drill
KINDS = 12  # of requests
OF_A_SERVER = 4  # faults: the supervisor pauses 1, 2, 4 and 8 seconds
HUNG = 10.0  # seconds that a stream may go on after its rank is lost, or after the last fault
BACK = 120.0  # seconds within which service must be back
FROZEN = 0.2  # share of faults that freeze a rank in place of killing it
RETRY = 0.05  # seconds until a client that was refused asks again


@dataclass
class FaultTally:
    """What happened to all requests, and how long service was away; its limits are in seconds."""

    hangs_after: float = HUNG
    gone_after: float = BACK
    faults: Counter[str] = field(default_factory=Counter)
    fates: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    hung: int = 0  # that ended too late, or not at all
    doubled: int = 0  # ended more than once, or said what they must not
    told: list[float] = field(default_factory=list)  # seconds until the last disturbed stream had ended, by fault
    back: list[float] = field(default_factory=list)  # seconds until a request was served again, by fault

    def report(self) -> dict[str, Any]:
        def summary(seconds: list[float]) -> dict[str, float]:
            return {"median": statistics.median(seconds), "most": max(seconds)} if seconds else {}

        return {"faults": dict(self.faults), "streams": dict(self.fates), "hung": self.hung, "doubled": self.doubled,
                "lost": self.fates[ledger.LOST], "errors": dict(self.errors), "seconds_until_told": summary(self.told),
                "seconds_until_back": summary(self.back), "not_back": sum(one >= self.gone_after for one in self.back)}


def bodies(rng: random.Random) -> list[dict[str, Any]]:
    """Greedy requests of different lengths."""
    return [{"prompt": [rng.randrange(64, 240) for _ in range(rng.randint(1, 200))], "temperature": 0,
             "max_tokens": rng.randint(16, 400), "ignore_eos": True} for _ in range(KINDS)]


def faults(times: int, width: int, stages: int, seed: int = 1, hangs_after: float = HUNG,
           gone_after: float = BACK, num_clients: int = CLIENTS) -> dict[str, Any]:
    """What `times` faults did, on servers of `stages` stages of `width` ranks."""
    rng, seen = random.Random(seed), FaultTally(hangs_after, gone_after)
    while times > 0:
        with serving("--dtype", "float32", "--tensor-parallel-size", str(width), "--pipeline-parallel-size",
                     str(stages)) as server:
            asyncio.run(_disturb(server, min(times, OF_A_SERVER), rng, seen, num_clients))
        times -= OF_A_SERVER
    return {"tensor_parallel_size": width, "pipeline_parallel_size": stages, "seed": seed, **seen.report()}


async def _disturb(server: Server, times: int, rng: random.Random, seen: FaultTally, num_clients: int) -> None:
    async with clients.session() as http:
        asked = bodies(rng)
        expected = [(await ask(http, server, body)).text for body in asked]
        answers: list[tuple[int, Answer]] = []
        enough = asyncio.Event()
        load = [asyncio.create_task(_stream(http, server, asked, answers, random.Random(rng.random()), enough))
                for _ in range(num_clients)]
        struck = []
        for _ in range(times):
            await asyncio.sleep(rng.uniform(0.3, 3.0))
            engine = server.engine_pid
            struck.append(_strike(engine, rng, seen))
            seen.back.append(await _back(http, server, asked[0], engine, struck[-1], seen.gone_after))
        enough.set()
        _, endless = await asyncio.wait(load, timeout=seen.hangs_after)
        seen.hung += len(endless)
        for task in endless:
            task.cancel()
        await asyncio.gather(*load, return_exceptions=True)
    judge(seen, answers, expected, struck)


async def _stream(http: aiohttp.ClientSession, server: Server, asked: list[dict[str, Any]],
                  answers: list[tuple[int, Answer]], rng: random.Random, enough: asyncio.Event) -> None:
    """A client that asks again and again until it is `enough`."""
    while not enough.is_set():
        kind = rng.randrange(len(asked))
        answer = await ask(http, server, asked[kind])
        if answer.fate == ledger.REFUSED:
            await asyncio.sleep(RETRY)
        else:
            answers.append((kind, answer))


def _strike(engine: int, rng: random.Random, seen: FaultTally) -> float:
    """Kills or freezes a rank; returns when.  Rank 0 is the engine process, and starts the others in order."""
    ranks = [engine, *(pid for pid in sorted(children(engine)) if "rank_process" in command(pid))]
    rank = rng.randrange(len(ranks))
    sent = signal.SIGSTOP if rank and rng.random() < FROZEN else signal.SIGKILL
    seen.faults[f"{sent.name} of rank {rank}"] += 1
    os.kill(ranks[rank], sent)
    return time.perf_counter()


async def _back(http: aiohttp.ClientSession, server: Server, body: dict[str, Any], lost: int, struck: float,
                limit: float) -> float:
    """Seconds until a request was served by another engine than the process `lost`."""
    while time.perf_counter() - struck < limit:
        if server.engine_pid not in (0, lost) and (await ask(http, server, body)).fate == ledger.COMPLETED:
            return time.perf_counter() - struck
        await asyncio.sleep(RETRY)
    return limit


def judge(seen: FaultTally, answers: list[tuple[int, Answer]], expected: list[str], struck: list[float]) -> None:
    for kind, answer in answers:
        seen.fates[answer.fate] += 1
        if answer.error:
            seen.errors[answer.error] += 1
        is_whole = answer.fate == ledger.COMPLETED
        seen.doubled += answer.ends > 1 or not (
            answer.text == expected[kind] if is_whole else expected[kind].startswith(answer.text))
    for moment in struck:
        ends = [answer.ended - moment for _, answer in answers if answer.sent < moment < answer.ended]
        seen.hung += sum(end > seen.hangs_after for end in ends)
        seen.told += [max(ends)] if ends else []
