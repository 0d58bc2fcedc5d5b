"""Hostile exchanges and slow clients in a process of its own, which gives way to all others.

usage: python -m benchmarks.reliability.attackers URL SEED [--slow TIMES] [--no-hostile]

Prints a JSON line for each exchange until it is killed: {"number": n, "name": kind, "from": s, "to": s, "wrong": law
broken or empty, "excusable": whether a lost engine explains it}.  An exchange is made again from seed and number.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import slow
from .exchanges import play
from .hostile import exchange, source
from .journal import Journal

AT_ONCE = 3
PAUSE = 0.25  # seconds on average between two exchanges of one attacker
NICE = 10
TOLD = "hostile exchanges are answered, and by no 5xx"


async def _attack(url: str, seed: int, numbers: Iterator[int], rng: random.Random) -> None:
    for number in numbers:
        one, began = exchange(seed, number), time.perf_counter()
        try:
            outcome = await play(url, one, source(number))
            wrong, excusable = outcome.objection(one), outcome.has_an_excuse
        except (OSError, TimeoutError) as error:
            wrong, excusable = f"no connection: {type(error).__name__}: {error}", True
        print(json.dumps({"number": number, "name": one.name, "from": began, "to": time.perf_counter(), "wrong": wrong,
                          "excusable": excusable}), flush=True)
        await asyncio.sleep(rng.expovariate(1 / PAUSE))


async def _all(url: str, seed: int, hostile: bool, slowly: int) -> None:
    rng, numbers = random.Random(f"{seed}-attackers"), itertools.count()
    tasks = [_attack(url, seed, numbers, random.Random(rng.random())) for _ in range(AT_ONCE if hostile else 0)]
    if slowly:
        tasks.append(slow.crowd(url, rng, slowly))
    await asyncio.gather(*tasks)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("seed", type=int)
    parser.add_argument("--slow", type=int, default=1)
    parser.add_argument("--no-hostile", action="store_true")
    asked = parser.parse_args()
    os.nice(NICE)
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        asyncio.run(_all(asked.url, asked.seed, not asked.no_hostile, asked.slow))


# -- from outside ------------------------------------------------------------------------------------------------


@dataclass
class Seen:
    """What attackers told of each exchange: (from, to, number, kind)."""

    exchanges: list[tuple[float, float, int, str]] = field(default_factory=list)

    def during(self, since: float, until: float) -> list[str]:
        """Exchanges that were under way between two moments."""
        return [f"{name} {number}" for start, end, number, name in self.exchanges if start <= until and since <= end]


@asynccontextmanager
async def attacking(url: str, journal: Journal, *options: str) -> AsyncIterator[Seen]:
    """Attackers beside what the block does; what they find is told to the journal."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.reliability.attackers", url, str(journal.seed), *options,
        stdout=asyncio.subprocess.PIPE, cwd=Path(__file__).parents[2])
    seen = Seen()
    task = asyncio.create_task(_listen(process, seen, journal))
    try:
        yield seen
    finally:
        if process.returncode is not None:
            journal.violated("the harness works", f"the attackers ended with status {process.returncode}")
        else:
            process.kill()
        await process.wait()
        for error in await asyncio.gather(task, return_exceptions=True):
            if isinstance(error, Exception):
                raise error


async def _listen(process: asyncio.subprocess.Process, seen: Seen, journal: Journal) -> None:
    assert process.stdout is not None
    async for line in process.stdout:
        try:
            said: dict[str, Any] = json.loads(line)
        except ValueError:  # cut off when it was killed
            continue
        seen.exchanges.append((said["from"], said["to"], said["number"], said["name"]))
        if said["wrong"] and not (said["excusable"] and journal.excused(said["from"], said["to"])):
            journal.violated(TOLD, f"seed {journal.seed}, exchange {said['number']} ({said['name']}): {said['wrong']}",
                             said["from"])


if __name__ == "__main__":
    main()
