"""A seeded generator of hostile HTTP exchanges: the same seed gives the same ones.

usage: python -m benchmarks.reliability.hostile URL [--seed N] [--count N] [--keep FILE]

plays a corpus against a server, prints violations, and appends their exchanges to FILE.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from tqdm import tqdm

from . import hostile_bodies, hostile_connections, hostile_heads
from .exchanges import LIMIT, Exchange, Outcome, add_to_corpus, play
from .journal import Journal
from .watch import Stderr

Generator = Callable[[random.Random], Exchange]
GENERATORS: tuple[Generator, ...] = (
    *hostile_heads.GENERATORS, *hostile_bodies.GENERATORS, *hostile_connections.GENERATORS)
CORPUS = Path(__file__).with_name("corpus.jsonl")
AT_ONCE = 4
LATE = 0.1  # seconds that a traceback may take to reach its file
SOURCES = 8  # client addresses, different from those of legitimate clients


def exchange(seed: int, number: int) -> Exchange:
    """Returns exchange `number`; kinds take turns, so that every range has a few of each."""
    rng = random.Random(f"{seed}-{number}")
    return GENERATORS[number % len(GENERATORS)](rng)


def generate(seed: int, count: int) -> list[Exchange]:
    return [exchange(seed, number) for number in range(count)]


def source(number: int) -> str:
    """Returns a loopback address for exchange `number`."""
    return f"127.0.2.{1 + number % SOURCES}"


Bite = tuple[Exchange, str, Outcome]
"""With what is wrong."""


async def play_all(url: str, exchanges: Iterable[Exchange], at_once: int = AT_ONCE,
                   complaint: Callable[[], str] = str, limit: float = LIMIT) -> list[Bite]:
    """Plays exchanges, `at_once` at a time.  Returns those that broke a law.

    Args:
        limit: seconds within which the expectation of each must hold.
        complaint: returns another violation since its last call; useful with one exchange at a time.
    """
    found: list[Bite] = []
    numbered = enumerate(tqdm(list(exchanges), desc="    hostile", mininterval=5.0))

    async def work() -> None:
        for number, one in numbered:
            try:
                outcome = await play(url, one, source(number), limit)
                wrong = outcome.objection(one, limit) or complaint()
            except (OSError, TimeoutError) as error:
                outcome, wrong = Outcome(ended=time.perf_counter()), f"no connection: {type(error).__name__}: {error}"
            if wrong:
                found.append((one, wrong, outcome))

    await asyncio.gather(*(work() for _ in range(at_once)))
    return found


def _tracebacks(stderr: Stderr) -> Callable[[], str]:
    """Returns a function that returns the first traceback since its last call."""
    stderr.look()

    def latest() -> str:
        time.sleep(LATE)
        return next((str(line["exception"]).splitlines()[-1] for line in stderr.look() if "exception" in line), "")

    return latest


def main() -> None:
    parser = argparse.ArgumentParser(description="Hostile HTTP against a server.")
    parser.add_argument("url")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--stderr", type=Path, help="file that takes the server's JSON lines: tracebacks bite, too; "
                        "exchanges are played one at a time")
    parser.add_argument("--keep", type=Path, help="file to which those that bite are added")
    asked = parser.parse_args()
    exchanges = generate(asked.seed, asked.count)
    if asked.stderr:
        bites = asyncio.run(play_all(asked.url, exchanges, 1, _tracebacks(Stderr(asked.stderr, Journal(asked.seed)))))
    else:
        bites = asyncio.run(play_all(asked.url, exchanges))
    for one, wrong, _ in bites:
        print(f"{one.name}: {wrong}\n    {one.as_line()[:300]}")
    print(f"{len(bites)} of {asked.count} bite")
    if asked.keep:
        print(f"{add_to_corpus(asked.keep, [one for one, _, _ in bites])} new ones kept in {asked.keep}")


if __name__ == "__main__":
    main()
