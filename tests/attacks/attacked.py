"""Attacks beside legitimate load: hostile HTTP, slow clients, and random faults; the laws that must hold meanwhile.

Random faults:

    quiet     the legitimate load alone: tokens of each request, the paced stream's largest gap, open files
    attacked  the same load with hostile clients, and faults at random moments
    settled   all clients disconnected: blocks, files, processes and memory are as before
    ended     SIGTERM: exit status 0, and no process or file left
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.server import MIB, Server, serving
from tqdm import tqdm

from attacks import attackers, clients, faults, ledger, slow
from attacks.attackers import AttackLog
from attacks.exchanges import read_corpus
from attacks.faults import CROWD, Fault, Field, connection, place_of
from attacks.hostile import CORPUS, generate, play_all
from attacks.mixed import MixedLoad
from attacks.paced import WORTH_TELLING
from attacks.processes import (
    Disk,
    Family,
    command,
    open_files,
    proportional,
    resident,
    small_disk,
    usual_files,
    zombies,
)
from attacks.watch import GAP, Gaps, HealthWatch, Journal, MemoryWatch, Stderr, paced
from slotwise.compute.kernels.cpu.jit import store

QUIET = (2.0, 60.0)  # seconds of the quiet run, at least and at most; else a quarter of the attacked one
LOSING, HARMLESS = 45.0, 6.0  # seconds from one fault to the next on average: those that lose the engine, and others
SPARE_FILES = 2  # descriptors of an API process beyond the quiet number
DISK = (192 * MIB, 256 << 10)  # bytes of the small disk: at least, and for each second
SETTLED = 20.0  # seconds after which files and processes must be as before
EXIT = 15.0  # seconds to exit, beside --shutdown-timeout
SHUTDOWN = 5.0
CACHE = 64 * MIB  # bytes of the key-value cache: the load fills it
MEMORY = 1.1  # times the ready line's figure: the limit of the engine process
GAP_LAW = "the paced stream's gap"
WORKER = "slotwise.api.http.worker_process"


@dataclass
class AttackRun:
    """One run: its settings and its findings."""

    seconds: float
    seed: int
    patience: float  # factor of time limits
    journal: Journal = field(init=False)
    figures: dict[str, Any] = field(default_factory=dict)
    leaked: int = 0

    def __post_init__(self) -> None:
        self.journal = Journal(self.seed)


def random_faults(seconds: float, seed: int, patience: float = 1.0) -> tuple[ledger.Row, Journal]:
    """Runs all phases.

    Args:
        patience: factor of time limits, for machines with other load.  Above 1 the paced stream's gaps are not
            judged.
    """
    run, family = AttackRun(seconds, seed, patience), Family()
    with small_disk(DISK[0] + int(seconds * DISK[1])) as disk:
        options = ("--dtype", "float32", "--log-format", "json", "--admin-api-key", "not-the-attackers",
                   "--kv-cache-memory", str(CACHE), "--engine-timeout", f"{faults.TIMEOUT * patience:g}",
                   "--shutdown-timeout", f"{SHUTDOWN:g}", "--event-log", str(disk.event_log))
        disk.adopt(store.home())
        with contextlib.ExitStack() as stack:
            with usual_files():
                server = stack.enter_context(serving(*options, environment=disk.environment | family.environment))
            fates = asyncio.run(_attacked(server, disk, family, run))
            _ended(server, disk, family, run)
    _judge_gaps(run)
    return _row(run, fates), run.journal


async def _attacked(server: Server, disk: Disk, family: Family, run: AttackRun) -> dict[str, int]:
    journal = run.journal
    load, memory = MixedLoad(server, journal), MemoryWatch(server)
    stderr = Stderr(server.log, journal, memory.hear)
    gaps = Gaps()
    run.figures["memory_ready"] = resident(server.engine_pid)
    async with clients.session() as http:
        await load.learn(http)
    beside = [asyncio.create_task(stderr.follow()), asyncio.create_task(memory.follow())]
    try:
        async with HealthWatch(server, journal, run.patience).watching() as health, paced(server, journal, gaps):
            await _quiet(server, load, gaps, run)
            async with load.running(salt=1), attackers.attacking(server.url, journal, run.patience) as seen:
                run.figures["seen"] = seen
                await _strike(Field(server, disk, journal, health, run.patience), run)
        await _settled(server, disk, family, run)
    except Exception as error:
        journal.violated("the server can be asked to the end", f"{type(error).__name__}: {error}")
    finally:
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
        stderr.look()
        memory.look()
    held, said = memory.closest()
    if held > MEMORY * said:
        journal.violated("memory as said", f"{held / MIB:.0f} MiB resident, {said / MIB:.0f} MiB said")
    run.figures |= {"gaps": gaps, "paced_answers": gaps.answers, "refusals": dict(load.refused),
                    "memory_engine": held, "memory_said": said, "memory_most_api": memory.api}
    return ledger.tally(load.fates.elements())


async def _quiet(server: Server, load: MixedLoad, gaps: Gaps, run: AttackRun) -> None:
    """Runs the same load without faults."""
    seconds = min(max(QUIET[0], run.seconds / 4), QUIET[1])
    print(f"    quiet for {seconds:g} s", flush=True)
    async with load.running(salt=0):
        await asyncio.sleep(2.0)  # until the load runs
        began = time.perf_counter()
        await asyncio.sleep(seconds)
    run.figures["quiet"] = (began, time.perf_counter())
    async with clients.session() as http:
        await clients.quiet(http, server, but=1)
    run.figures["files_quiet"] = open_files(server.process.pid)


async def _strike(field: Field, run: AttackRun) -> None:
    """Runs faults of two kinds, each at random moments of its own, for the whole run."""
    began = time.perf_counter()
    tasks = [asyncio.create_task(_every(LOSING, faults.LOSING, field, run)),
             asyncio.create_task(_every(HARMLESS, faults.HARMLESS, field, run))]
    shown = tqdm(total=run.seconds, unit="s", desc="    attacked", bar_format="{desc} {percentage:3.0f}%|{bar}| "
                 "{n:.0f}/{total:.0f} s {postfix}", mininterval=0.5 if sys.stderr.isatty() else 10.0)
    with shown:
        while (past := time.perf_counter() - began) < run.seconds and field.server.process.poll() is None:
            shown.set_postfix_str(f"actions {len(run.journal.actions)}, violations {sum(run.journal.counts.values())}",
                                  refresh=False)
            shown.update(past - shown.n)
            await asyncio.sleep(0.5)
    if (status := field.server.process.poll()) is not None:
        run.journal.violated("the server lives", f"it ended with status {status}: {field.server.said()[-300:]}")
    run.figures["attacked"] = (began, time.perf_counter())
    await _finish(tasks, run)


async def _every(mean: float, among: dict[Fault, int], field: Field, run: AttackRun) -> None:
    """Runs faults until the run's time is over; the one in progress then completes."""
    mean = min(mean, run.seconds / (4 if among is faults.LOSING else 8))
    rng = random.Random(f"{run.seed}-{'losing' if among is faults.LOSING else 'harmless'}")
    end = time.perf_counter() + run.seconds
    while (pause := rng.expovariate(1 / mean)) < end - time.perf_counter():
        await asyncio.sleep(pause)
        await faults.drawn(rng, among)(field, rng)


async def _finish(tasks: list[asyncio.Task[None]], run: AttackRun) -> None:
    for error in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(error, BaseException):
            run.journal.violated("the harness works", f"{type(error).__name__}: {error}")


# -- afterwards --------------------------------------------------------------------------------------------------


async def _settled(server: Server, disk: Disk, family: Family, run: AttackRun) -> None:
    """Checks that everything is freed after all clients have disconnected."""
    journal = run.journal
    async with clients.session() as http:
        await clients.quiet(http, server)
        run.leaked = await clients.leaked(http, server)
        status, state = await clients.health(http, server)
    if status != 200 or state.get("num_live"):
        journal.violated("nothing is left under way", f"/health says {status} {state}")
    most, files = run.figures["files_quiet"] + SPARE_FILES, 0
    limit = SETTLED * run.patience
    if not await _comes(lambda: open_files(server.process.pid) <= most, limit):
        files = open_files(server.process.pid)
        journal.violated("no file or socket left", f"{files} descriptors, {most - SPARE_FILES} in the quiet run")
    if not await _comes(lambda: not _surplus(family) and not zombies(server.process.pid), limit):
        journal.violated("no process left", f"{[command(pid) for pid in family.living()]}, "
                         f"{zombies(server.process.pid)} zombies")
    if left := disk.leftovers():
        journal.violated("no temporary file left", ", ".join(left[:10]))
    run.figures |= {"files_end": open_files(server.process.pid),
                    "memory_end_engine_pss": proportional(server.engine_pid),
                    "memory_end_engine_rss": resident(server.engine_pid)}


def _surplus(family: Family) -> list[str]:
    """Returns processes beyond the API process, its engine and a worker of each kind."""
    commands = sorted(map(command, family.living()))
    workers = {one for one in commands if WORKER in one}
    others = [one for one in commands if WORKER not in one]
    return [one for one in commands if WORKER in one and commands.count(one) > 1] + others[2:] + sorted(workers)[2:]


async def _comes(holds: Callable[[], bool], limit: float) -> bool:
    """Returns whether `holds` becomes true within `limit` seconds."""
    began = time.perf_counter()
    while not holds():
        if time.perf_counter() - began > limit:
            return False
        await asyncio.sleep(0.2)
    return True


def _ended(server: Server, disk: Disk, family: Family, run: AttackRun) -> None:
    """Sends SIGTERM, and checks that nothing is left."""
    journal = run.journal
    asked = time.perf_counter()
    if server.process.poll() is None:
        server.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(Exception):
            server.process.wait(SHUTDOWN + EXIT * run.patience)
    if server.process.poll() != 0:
        journal.violated("SIGTERM ends it with status 0", f"status {server.process.poll()} after "
                         f"{time.perf_counter() - asked:.1f} s")
    if left := family.living():
        journal.violated("no process left", f"after the end: {[command(pid) for pid in left]}")
    if files := disk.leftovers():
        journal.violated("no temporary file left", "after the end: " + ", ".join(files[:10]))


def _judge_gaps(run: AttackRun) -> None:
    """Compares the paced stream's largest gap outside of windows with that of the quiet run."""
    gaps: Gaps = run.figures.pop("gaps")
    seen: AttackLog = run.figures.pop("seen", AttackLog())
    quiet = gaps.largest(*run.figures.pop("quiet"), lambda since, until: False)
    attacked = gaps.largest(*run.figures.pop("attacked"), run.journal.excused)
    most = quiet[0][0] if quiet else WORTH_TELLING
    for seconds, at in attacked[:20]:
        told = (f"{1000 * seconds:.0f} ms, of which the API process computed {1000 * gaps.computing[at]:.0f}; "
                f"{1000 * most:.0f} ms in the quiet run; beside it: " + ", ".join(seen.during(at - 0.1, at + seconds)))
        run.journal.noted("a gap of the paced stream", told, at)
        if run.patience == 1.0 and seconds > most + GAP:
            run.journal.violated(GAP_LAW, told, at)
    run.figures |= {"hostile_exchanges": len(seen.exchanges), "gap_quiet_ms": 1000 * most,
                    "gap_attacked_ms": 1000 * attacked[0][0] if attacked else 0.0,
                    "paced_failures": len(gaps.failures)}


def _row(run: AttackRun, fates: dict[str, int]) -> ledger.Row:
    journal, figures = run.journal, run.figures
    laws = ("each request ends once", "tokens as in the quiet run", "no error where nothing was done to the engine",
            "/health tells the truth", "an engine comes back", "no file or socket left", "no process left",
            "no temporary file left", "no traceback in stderr", "memory as said",
            *((GAP_LAW,) if run.patience == 1.0 else ()))
    counts = journal.counts
    holds = {law: law not in counts for law in dict.fromkeys([*laws, *counts])}
    figures |= {"seed": run.seed, "excluded_seconds": journal.excluded(), "violated": counts,
                "violations": journal.as_json()["violations"][:50]}
    return ledger.Row(
        f"random faults for {run.seconds:g} s, seed {run.seed}"
        + ("" if run.patience == 1.0 else ", beside other work: gaps are not judged"), fates, run.leaked, holds,
        [f"{len(journal.windows)} times a process was killed or stopped, {len(journal.actions)} actions in all; "
         f"{figures['hostile_exchanges']:,} hostile exchanges; {figures['excluded_seconds']:.0f} s of windows "
         "around kills and stops are excluded from the gap's law",
         f"the paced stream's largest gap {figures['gap_attacked_ms']:.0f} ms, in the quiet run at most "
         f"{figures['gap_quiet_ms']:.0f} ms",
         f"engines held at most {100 * figures['memory_engine'] / figures['memory_said']:.0f}% of the memory that was "
         f"said of them ({figures['memory_said'] / MIB:.0f} MiB)"],
        figures)


def keep_log(journal: Journal, folder: Path | None = None) -> Path:
    """Writes the whole log of actions and violations.  Returns its path."""
    place = (folder or Path(tempfile.gettempdir())) / f"slotwise-faults-seed{journal.seed}.json"
    place.write_text(json.dumps(journal.as_json(), indent=1) + "\n")
    return place


OPTIONS = ("--dtype", "float32", "--log-format", "json", "--admin-api-key", "not-the-attackers")
COUNT = 1000  # exchanges of a corpus
QUIET_SECONDS = 10.0  # seconds
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
        await asyncio.sleep(QUIET_SECONDS)
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
