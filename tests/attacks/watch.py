"""Monitors of an attacked server (its health, a stream's gaps, its stderr, its memory), and the journal of actions.

In a *window* a response may be an explicit error, because the engine or the API process was killed or stopped.
Outside of windows all laws hold.  Times are seconds of `time.perf_counter`, which all processes of a machine share;
printed ones are seconds since the run began.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from benchmarks.server import Server
from tqdm import tqdm

from attacks import module, module_environment
from attacks.processes import resident

SETTLE = 0.5  # seconds after a window's end in which its errors may still arrive
MAX_KEPT = 200  # violations stored one by one; more are only counted
MAX_SHOWN = 10  # violations printed for each law
LATEST = 12  # actions printed with a violation


@dataclass(slots=True)
class Window:
    """`ended` is infinite while it is open."""

    why: str
    began: float
    ended: float = float("inf")

    def overlaps(self, since: float, until: float) -> bool:
        return self.began <= until and since <= self.ended + SETTLE


@dataclass(slots=True)
class Violation:
    """`latest` are the actions before it."""

    at: float  # seconds since the run began
    law: str
    what: str
    latest: list[str]


@dataclass(slots=True)
class Journal:
    """The journal of one run: actions, windows and violations."""

    seed: int
    began: float = field(default_factory=time.perf_counter)
    actions: list[tuple[float, str]] = field(default_factory=list)
    windows: list[Window] = field(default_factory=list)
    violations: list[Violation] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)  # violations of each law
    notes: list[tuple[float, str, str]] = field(default_factory=list)  # what was seen and breaks no law

    def since(self, at: float) -> float:
        return round(at - self.began, 3)

    def did(self, what: str) -> None:
        """Records an action, with what a repetition of the run needs."""
        self.actions.append((self.since(time.perf_counter()), what))

    def noted(self, what: str, told: str, at: float) -> None:
        """Records what was seen at a time."""
        self.notes.append((self.since(at), what, told[:600]))

    def violated(self, law: str, what: str, at: float | None = None) -> None:
        """Records a violation of `law`, and prints it at once.

        Args:
            at: its time; None: now.
        """
        self.counts[law] = self.counts.get(law, 0) + 1
        if self.counts[law] > MAX_KEPT:
            return
        moment = self.since(time.perf_counter() if at is None else at)
        latest = [f"{when:.3f} {action}" for when, action in self.actions if when <= moment][-LATEST:]
        self.violations.append(Violation(moment, law, what[:600], latest))
        if self.counts[law] <= MAX_SHOWN:
            tqdm.write(f"    {moment:8.1f} s  seed {self.seed}  {law}: {what[:300]}")

    @contextlib.contextmanager
    def window(self, why: str) -> Iterator[Window]:
        """Opens a window for the block and shortly after it."""
        opened = Window(why, time.perf_counter())
        self.windows.append(opened)
        try:
            yield opened
        finally:
            opened.ended = time.perf_counter()

    def excused(self, since: float, until: float) -> bool:
        """Returns whether a window overlaps the time between two moments."""
        return any(window.overlaps(since, until) for window in self.windows)

    def excluded(self) -> float:
        """Returns the seconds within windows."""
        total, reached = 0.0, 0.0
        for window in sorted(self.windows, key=lambda one: one.began):
            start, end = max(window.began, reached), min(window.ended, time.perf_counter()) + SETTLE
            total += max(0.0, end - start)
            reached = max(reached, end)
        return total

    def as_json(self) -> dict[str, Any]:
        return {"seed": self.seed, "violated": self.counts, "violations": [asdict(one) for one in self.violations],
                "windows": [[self.since(one.began), self.since(one.ended), one.why] for one in self.windows],
                "notes": self.notes, "actions": self.actions}


POLL = 0.05  # seconds between two polls of /health
PATIENCE = 2.0  # seconds after which /health counts as unanswered
INSTANT = 1e-6  # seconds: the rounding error of a moment
GAP = 0.100  # seconds by which the paced stream's largest gap may exceed that of the quiet run
TRUTH = 3.0  # seconds after which /health must be correct
NO_ANSWER = 0
OK = 200
AGAIN = re.compile(r"ready again, with (\d+) bytes of memory")


class HealthWatch:
    """Polls `/health`, and checks that it returns 200 outside of windows.

    Each change of status is stored with the time of its request.

    Args:
        patience: factor of the time limit of a response.
    """

    def __init__(self, server: Server, journal: Journal, patience: float = 1.0) -> None:
        self.changes: list[tuple[float, int]] = []
        self._server, self._journal, self._patience = server, journal, PATIENCE * patience
        self._told = False

    @property
    def status(self) -> int:
        return self.changes[-1][1] if self.changes else OK

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[HealthWatch]:
        task = asyncio.create_task(self._watch())
        try:
            yield self
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _watch(self) -> None:
        timeout = aiohttp.ClientTimeout(total=self._patience)
        async with aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, force_close=True), timeout=timeout) as http:
            while True:
                asked = time.perf_counter()
                status, said = await self._look(http)
                if not self.changes or self.changes[-1][1] != status:
                    self.changes.append((asked, status))
                self._judge(asked, status, said)
                await asyncio.sleep(POLL)

    async def _look(self, http: aiohttp.ClientSession) -> tuple[int, str]:
        try:
            async with http.get(f"{self._server.url}/health") as response:
                return response.status, (await response.text())[:200]
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            return NO_ANSWER, f"{type(error).__name__}: {error}"

    def _judge(self, asked: float, status: int, said: str) -> None:
        """Reports each period of bad health outside of windows once."""
        if status == OK:
            self._told = False
        elif not self._told and not self._journal.excused(asked, time.perf_counter()):
            self._told = True
            self._journal.violated("/health tells the truth", f"{status or 'no answer'} while nothing was done to the "
                                   f"engine: {said}", asked)

    def first(self, wanted: Callable[[int], bool], since: float) -> float:
        """Returns the seconds from `since` to the first wanted status, at `since` or later; infinite without one."""
        inside = [(at, status) for at, status in self.changes if at > since + INSTANT]
        before = [status for at, status in self.changes if at <= since + INSTANT]
        if before and wanted(before[-1]):
            return 0.0
        return min((at - since for at, status in inside if wanted(status)), default=float("inf"))

    async def until(self, wanted: Callable[[int], bool], since: float, limit: float) -> float:
        """Waits at most `limit` seconds after `since` for a wanted status.  Returns the seconds, or infinity."""
        while self.first(wanted, since) == float("inf") and time.perf_counter() - since < limit:
            await asyncio.sleep(POLL / 2)
        return self.first(wanted, since)


@dataclass
class Gaps:
    """The reports of the paced stream: waits (from, to), and complete responses."""

    waits: list[tuple[float, float]] = field(default_factory=list)
    computing: dict[float, float] = field(default_factory=dict)  # seconds of the API process, by the start of the wait
    answers: int = 0
    failures: list[tuple[float, str]] = field(default_factory=list)
    text: str = ""  # of the first complete response, and so of all

    def largest(self, since: float, until: float, excused: Callable[[float, float], bool]) -> list[tuple[float, float]]:
        """Returns (seconds, time) of waits between two moments and outside of windows, the largest first."""
        found = [(end - start, start) for start, end in self.waits
                 if start >= since and end <= until and not excused(start, end)]
        return sorted(found, reverse=True)


@asynccontextmanager
async def paced(server: Server, journal: Journal, gaps: Gaps) -> AsyncIterator[None]:
    """Runs a stream during the block, in a process of its own (see `paced`), and reports to `gaps`."""
    process = await asyncio.create_subprocess_exec(
        *module("paced"), server.url, str(server.process.pid), stdout=asyncio.subprocess.PIPE, env=module_environment())
    task = asyncio.create_task(_listen(process, gaps, journal))
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        await asyncio.gather(task, return_exceptions=True)


async def _listen(process: asyncio.subprocess.Process, gaps: Gaps, journal: Journal) -> None:
    assert process.stdout is not None
    async for line in process.stdout:
        try:
            said = json.loads(line)
        except ValueError:  # truncated when the process was killed
            continue
        if "from" in said:
            gaps.waits.append((said["from"], said["to"]))
            gaps.computing[said["from"]] = said["computing"]
        elif "failed" in said:
            gaps.failures.append((said["at"], said["failed"]))
        else:
            gaps.answers += 1
            gaps.text = gaps.text or said["text"]
            if said["text"] != gaps.text:
                journal.violated("tokens as in the quiet run", f"the paced stream said {said['text'][:80]!r}")


class Stderr:
    """Reads a server's stderr once, and searches it for tracebacks."""

    def __init__(self, log: Path, journal: Journal, hear: Callable[[str], None] = lambda message: None) -> None:
        """`hear` is called with each line's message."""
        self._log, self._journal, self._hear = log, journal, hear
        self._read = 0
        self._rest = ""

    def look(self) -> list[dict[str, Any]]:
        """Returns the lines since the last call; a traceback among them breaks a law."""
        with self._log.open("rb") as file:
            file.seek(self._read)
            data = file.read()
        self._read += len(data)
        *lines, self._rest = (self._rest + data.decode(errors="replace")).split("\n")
        found = []
        for line in lines:
            try:
                fields = json.loads(line)
            except ValueError:
                fields = {"message": line, "level": "raw"}
            found.append(fields)
            self._hear(str(fields.get("message")))
            if "exception" in fields or "Traceback" in str(fields.get("message")):
                told = fields.get("exception") or fields["message"]
                self._journal.violated(
                    "no traceback in stderr", f"{fields['message'][:150]}: {str(told).strip().splitlines()[-1][:300]}")
        return found

    async def follow(self) -> None:
        while True:
            self.look()
            await asyncio.sleep(0.5)


class MemoryWatch:
    """The peak memory of each engine and of the API process, and each engine's stated limit."""

    def __init__(self, server: Server) -> None:
        self.api = 0  # bytes
        self.engines: dict[int, int] = {}  # bytes, by process
        self.said = {server.engine_pid: int(dict(server.ready)["memory_bytes"])}  # bytes, by process
        self._server = server

    async def follow(self) -> None:
        while True:
            self.look()
            await asyncio.sleep(1.0)

    def look(self) -> None:
        pid = self._server.engine_pid
        self.engines[pid] = max(self.engines.get(pid, 0), resident(pid))
        self.api = max(self.api, resident(self._server.process.pid))

    def hear(self, message: str) -> None:
        """Reads a line of the server's log: a replacement engine states a figure of its own."""
        if found := AGAIN.search(message):
            self.said[self._server.engine_pid] = int(found[1])

    def closest(self) -> tuple[int, int]:
        """Returns used and stated bytes of the engine with the largest share of its stated limit."""
        pairs = [(self.engines.get(pid, 0), said) for pid, said in self.said.items() if pid]
        return max(pairs, key=lambda pair: pair[0] / pair[1])
