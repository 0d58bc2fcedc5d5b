"""Scenarios with engines that die, freeze, or compute one long step."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from typing import Any

import aiohttp

from . import clients, ledger
from .clients import Answer, HealthWatch, ask
from .leaving import prompt
from .server import Metrics, Server, serving

CROWD = 96  # requests at once, for 64 slots
LATER = 20  # requests after the engine has come back
BACK = 60.0  # seconds within which the engine must return
TIMEOUT = 4.0  # --engine-timeout: the shortest there may be
SLACK = 1.5  # seconds by which a watch that polls twice a second may be late on a busy machine
WHOLE_PROMPTS = 63  # that make one long step
STEP_TOKENS = 65536


def killed(seconds: float) -> ledger.Row:
    with serving() as server:
        return asyncio.run(_killed(server))


async def _killed(server: Server) -> ledger.Row:
    async with clients.session() as http, HealthWatch(http, server).watching() as watch:
        inside = await _crowd(http, server)
        os.kill(server.engine_pid, signal.SIGKILL)
        struck = time.perf_counter()
        answers = [await task for task in inside]
        told = max(answer.ended for answer in answers) - struck
        during = [await ask(http, server, {"prompt": [5], "max_tokens": 1}) for _ in range(LATER)]
        down = await watch.until(503, struck, BACK)
        back = await watch.until(200, struck + down, BACK) + down
        later, leaked = await _afterwards(http, server)
    return ledger.Row(
        "kill -9 of the engine process", ledger.tally(a.fate for a in [*answers, *during, *later]), leaked,
        {"each stream ended with an explicit error": _all(answers, ledger.FAILED),
         "/health was 503, then 200": back < BACK, "503 meanwhile": _all(during, ledger.REFUSED),
         "later requests are served": _all(later, ledger.COMPLETED)},
        [f"{len(answers)} requests ended with an error within {1000 * told:.0f} ms; /health 503 after "
         f"{1000 * down:.0f} ms, 200 again after {back:.1f} s; {LATER} requests meanwhile got 503, {LATER} afterwards "
         "were served"],
        {"error": answers[0].error, "ms_until_all_told": 1000 * told, "ms_until_503": 1000 * down,
         "seconds_until_200": back})


def frozen(seconds: float) -> ledger.Row:
    with serving("--engine-timeout", str(TIMEOUT), "--max-num-batched-tokens", str(STEP_TOKENS)) as server:
        return asyncio.run(_frozen(server))


async def _frozen(server: Server) -> ledger.Row:
    async with clients.session() as http, HealthWatch(http, server).watching() as watch:
        busy, oldest, unhealthy = await _busy(http, server, watch)
        inside = await _crowd(http, server)
        os.kill(server.engine_pid, signal.SIGSTOP)
        struck = time.perf_counter()
        down = await watch.until(503, struck, BACK)
        answers = [await task for task in inside]
        told = max(answer.ended for answer in answers) - struck
        back = await watch.until(200, struck + told, BACK) + told
        later, leaked = await _afterwards(http, server)
    states = {body.get("engine") for at, _, body in watch.seen if at >= struck}
    return ledger.Row(
        "a busy engine, then a frozen one", ledger.tally(a.fate for a in [busy, *answers, *later]), leaked,
        {"busy is healthy": not unhealthy and busy.fate == ledger.COMPLETED,
         "the step was long": oldest > TIMEOUT / 2,
         "/health told in time": down <= TIMEOUT / 2 + SLACK and "frozen" in states,
         "each stream ended with an explicit error": _all(answers, ledger.FAILED),
         "given up in time": told <= TIMEOUT + SLACK, "/health was 200 again": back < BACK,
         "later requests are served": _all(later, ledger.COMPLETED)},
        [f"busy for {oldest:.1f} s without a step's end, more than the {TIMEOUT / 2:g} s that make silence suspicious: "
         "/health stayed 200",
         f"SIGSTOP, --engine-timeout {TIMEOUT:g}: /health 503 (frozen) after {down:.1f} s, {len(answers)} requests "
         f"ended with an error after {told:.1f} s, 200 again after {back:.1f} s; {LATER} requests afterwards were "
         "served"],
        {"error": answers[0].error, "longest_step_age": oldest, "seconds_until_503": down,
         "seconds_until_told": told, "seconds_until_200": back})


async def _busy(http: aiohttp.ClientSession, server: Server, watch: HealthWatch) -> tuple[Answer, float, bool]:
    """Returns the answer of one very long step, the longest time without a step, and whether /health was ever bad."""
    rng = random.Random(8)
    await ask(http, server, {"prompt": [5], "max_tokens": 1})
    began = time.perf_counter()
    prompts = [[rng.randrange(100, 4000) for _ in range(1000)] for _ in range(WHOLE_PROMPTS)]
    answer = await ask(http, server, {"prompt": prompts, "max_tokens": 1})
    seen = [(status, body) for at, status, body in watch.seen if at >= began]
    oldest = max((body["last_step_age_s"] for _, body in seen if body.get("engine") == "busy"), default=0.0)
    return answer, oldest, any(status != 200 for status, _ in seen)


async def _crowd(http: aiohttp.ClientSession, server: Server) -> list[asyncio.Task[Answer]]:
    """Starts requests that hold every slot, and some that wait."""
    rng = random.Random(5)
    tasks = [asyncio.create_task(ask(http, server, body)) for body in _long(rng)]
    while (await Metrics.read(http, server))["num_requests_running"] < 60:
        await asyncio.sleep(0.05)
    return tasks


def _long(rng: random.Random) -> list[dict[str, Any]]:
    return [{"prompt": prompt(rng), "max_tokens": 800, "ignore_eos": True} for _ in range(CROWD)]


async def _afterwards(http: aiohttp.ClientSession, server: Server) -> tuple[list[Answer], int]:
    body = {"prompt": "import os", "max_tokens": 32, "ignore_eos": True}
    later = await asyncio.gather(*(ask(http, server, body) for _ in range(LATER)))
    await clients.quiet(http, server)
    return later, await clients.leaked(http, server)


def _all(answers: list[Answer], fate: str) -> bool:
    return bool(answers) and all(answer.fate == fate for answer in answers)
