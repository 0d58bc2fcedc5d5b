"""Runs hostile exchanges and slow clients in a process of its own, at the lowest priority.

usage: python -m attacks.attackers URL SEED [--patience FACTOR]

Prints a JSON line for each exchange until it is killed: {"number": n, "name": kind, "from": s, "to": s, "wrong": law
broken or empty, "excusable": whether a lost engine explains it}.  Seed and number reproduce an exchange.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from attacks import module, module_environment, slow
from attacks.exchanges import LIMIT, play
from attacks.hostile import exchange, source
from attacks.watch import Journal

AT_ONCE = 3
PAUSE = 0.25  # seconds on average between two exchanges of one attacker
NICE = 10
TOLD = "hostile exchanges are answered, and by no 5xx"


async def _attack(url: str, seed: int, numbers: Iterator[int], rng: random.Random, limit: float) -> None:
    for number in numbers:
        one, began = exchange(seed, number), time.perf_counter()
        try:
            outcome = await play(url, one, source(number), limit)
            wrong, excusable = outcome.objection(one, limit), outcome.has_an_excuse
        except (OSError, TimeoutError) as error:
            wrong, excusable = f"no connection: {type(error).__name__}: {error}", True
        print(json.dumps({"number": number, "name": one.name, "from": began, "to": time.perf_counter(), "wrong": wrong,
                          "excusable": excusable}), flush=True)
        await asyncio.sleep(rng.expovariate(1 / PAUSE))


async def _all(asked: argparse.Namespace) -> None:
    rng, numbers = random.Random(f"{asked.seed}-attackers"), itertools.count()
    tasks = [_attack(asked.url, asked.seed, numbers, random.Random(rng.random()), LIMIT * asked.patience)
             for _ in range(AT_ONCE)]
    tasks.append(slow.crowd(asked.url, rng))
    await asyncio.gather(*tasks)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("seed", type=int)
    parser.add_argument("--patience", type=float, default=1.0, help="by which limits of time are stretched")
    asked = parser.parse_args()
    os.nice(NICE)
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        asyncio.run(_all(asked))


# -- from outside ------------------------------------------------------------------------------------------------


@dataclass
class AttackLog:
    """The attackers' report of each exchange: (from, to, number, kind)."""

    exchanges: list[tuple[float, float, int, str]] = field(default_factory=list)

    def during(self, since: float, until: float) -> list[str]:
        """Returns the exchanges in progress between two moments."""
        return [f"{name} {number}" for start, end, number, name in self.exchanges if start <= until and since <= end]


@asynccontextmanager
async def attacking(url: str, journal: Journal, patience: float = 1.0) -> AsyncIterator[AttackLog]:
    """Runs attackers during the block; the journal records their findings."""
    process = await asyncio.create_subprocess_exec(
        *module("attackers"), url, str(journal.seed), "--patience", str(patience), stdout=asyncio.subprocess.PIPE,
        env=module_environment())
    seen = AttackLog()
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


async def _listen(process: asyncio.subprocess.Process, seen: AttackLog, journal: Journal) -> None:
    assert process.stdout is not None
    async for line in process.stdout:
        try:
            said: dict[str, Any] = json.loads(line)
        except ValueError:  # truncated when the process was killed
            continue
        seen.exchanges.append((said["from"], said["to"], said["number"], said["name"]))
        if said["wrong"] and not (said["excusable"] and journal.excused(said["from"], said["to"])):
            journal.violated(TOLD, f"seed {journal.seed}, exchange {said['number']} ({said['name']}): {said['wrong']}",
                             said["from"])


if __name__ == "__main__":
    main()
