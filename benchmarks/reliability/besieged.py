"""Runs hostile HTTP, and slow and silent clients, each beside legitimate load and a paced stream, without faults."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Awaitable, Callable

from . import clients, ledger, slow
from .disk import open_files, usual_files
from .exchanges import read_corpus
from .faults import CROWD, connection, place_of
from .hostile import CORPUS, generate, play_all
from .journal import Journal
from .mixed import MixedLoad
from .server import Server, serving
from .watch import GAP, Gaps, HealthWatch, Stderr, paced

OPTIONS = ("--dtype", "float32", "--log-format", "json", "--admin-api-key", "not-the-attackers")
COUNT = 1000  # exchanges of a corpus
QUIET = 10.0  # seconds
SLOW_TIMES = 5  # times the usual number of slow clients
LAWS = ("each request ends once", "tokens as in the quiet run", "no error where nothing was done to the engine",
        "/health tells the truth", "no traceback in stderr", "no file or socket left", "the paced stream's gap",
        "hostile exchanges are answered, and by no 5xx")
Attack = Callable[[Server, Journal], Awaitable[str]]
"""Returns what was done, for people."""


def hostile(seconds: float, seed: int) -> ledger.Row:
    """Runs a thousand exchanges of a seed, and the stored corpus."""
    with serving(*OPTIONS) as server:
        return asyncio.run(_beside(server, Journal(seed), f"{COUNT:,} hostile exchanges, seed {seed}", _hostile))


def slow_clients(seconds: float, seed: int) -> ledger.Row:
    """Runs many clients that send nothing, send too slowly, or read nothing."""
    async def attack(server: Server, journal: Journal) -> str:
        return await _slow(server, journal, seconds)

    with contextlib.ExitStack() as stack:
        with usual_files():
            server = stack.enter_context(serving(*OPTIONS))
        return asyncio.run(_beside(server, Journal(seed), f"slow and silent clients for {seconds:g} s", attack))


async def _hostile(server: Server, journal: Journal) -> str:
    exchanges = [*generate(journal.seed, COUNT), *read_corpus(CORPUS)]
    for one, wrong, outcome in await play_all(server.url, exchanges):
        journal.violated(LAWS[-1], f"{one.name}: {wrong}: {one.as_line()[:200]}", outcome.began or outcome.ended)
    return f"{len(exchanges):,} exchanges"


async def _slow(server: Server, journal: Journal, seconds: float) -> str:
    rng = random.Random(f"{journal.seed}-slow")
    crowd = asyncio.create_task(slow.crowd(server.url, rng, SLOW_TIMES))
    await asyncio.sleep(seconds / 2)
    silent = []
    for count in range(CROWD):
        with contextlib.suppress(OSError):
            silent.append(connection(place_of(server), rng))
        if count % 20 == 0:
            await asyncio.sleep(0)
    await asyncio.sleep(seconds / 2)
    for one in silent:
        one.close()
    crowd.cancel()
    await asyncio.gather(crowd, return_exceptions=True)
    return f"{SLOW_TIMES * sum(slow.KINDS.values())} slow clients at a time, and {len(silent):,} silent connections"


async def _beside(server: Server, journal: Journal, name: str, attack: Attack) -> ledger.Row:
    """Runs the attack beside legitimate load, and checks the laws."""
    load, stderr, gaps = MixedLoad(server, journal), Stderr(server.log, journal), Gaps()
    async with clients.session() as http:
        await load.learn(http)
    async with paced(server, journal, gaps), HealthWatch(server, journal).watching(), load.running(salt=0):
        began = time.perf_counter()
        await asyncio.sleep(QUIET)
        files, attacked = open_files(server.process.pid), time.perf_counter()
        said = await attack(server, journal)
        ended = time.perf_counter()
    async with clients.session() as http:
        await clients.quiet(http, server)
        leaked = await clients.leaked(http, server)
    await asyncio.sleep(2.0)
    if (left := open_files(server.process.pid)) > files:
        journal.violated("no file or socket left", f"{left} descriptors, {files} beside the quiet load")
    stderr.look()
    (quiet, _), (most, at) = _largest(gaps, began, attacked), _largest(gaps, attacked, ended)
    if most > quiet + GAP:
        journal.violated("the paced stream's gap", f"{1000 * most:.0f} ms, of which the API process computed "
                         f"{1000 * gaps.computing[at]:.0f}; {1000 * quiet:.0f} ms in the quiet run", at)
    return ledger.Row(
        name, ledger.tally(load.fates.elements()), leaked,
        {law: law not in journal.counts for law in dict.fromkeys([*LAWS, *journal.counts])},
        [f"{said}; the paced stream's largest gap {1000 * most:.0f} ms, {1000 * quiet:.0f} ms in the quiet run"],
        {"seed": journal.seed, "violated": journal.counts, "gap_quiet_ms": 1000 * quiet, "gap_attacked_ms": 1000 * most,
         "violations": journal.as_json()["violations"][:50]})


def _largest(gaps: Gaps, since: float, until: float) -> tuple[float, float]:
    """Returns the largest gap in seconds and its time; 0 without a reported one."""
    found = gaps.largest(since, until, lambda start, end: False)
    return found[0] if found else (0.0, since)
