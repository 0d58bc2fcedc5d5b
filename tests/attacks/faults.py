"""Faults of a server's processes, disk and sockets, and the health that must follow."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from dataclasses import field as made
from urllib.parse import urlsplit

from benchmarks.server import Server

from attacks.processes import Disk, command, descendants
from attacks.watch import OK, TRUTH, HealthWatch, Journal

START = 60.0  # seconds of an engine's start beside load
LONGEST_PAUSE = 60.0  # seconds that the supervisor pauses before a start
TIMEOUT = 4.0  # --engine-timeout: the shortest there may be
SLACK = 1.5  # seconds by which watches that poll twice a second may be late on a busy machine
CROWD = 1500  # connections of a burst, more than the 1,024 files that a process may have by default
SOURCES = 8  # client addresses, different from those of legitimate clients


@dataclass
class Field:
    """The context of faults."""

    server: Server
    disk: Disk
    journal: Journal
    health: HealthWatch
    patience: float = 1.0  # factor of time limits
    alone: asyncio.Lock = made(default_factory=asyncio.Lock)  # held by a fault that stops or kills a process

    @property
    def family(self) -> list[int]:
        """Returns the API process and its descendants."""
        return [self.server.process.pid, *descendants(self.server.process.pid)]

    def strike(self, pid: int, number: int) -> bool:
        """Sends a signal.  Returns False if the process has ended."""
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return False
        return True

    async def tells_the_truth(self, struck: float, what: str) -> None:
        """Checks that /health stops returning 200 within three seconds."""
        limit = TRUTH * self.patience
        down = await self.health.until(lambda status: status != OK, struck, limit + 0.5)
        if down > limit:
            self.journal.violated("/health tells the truth", f"still 200 {limit:g} s after {what}", struck)

    async def recovers(self, struck: float, what: str, limit: float) -> None:
        """Checks that /health returns 200 again within `limit` seconds."""
        limit *= self.patience
        seconds = await self.health.until(lambda status: status == OK, struck, limit)
        if seconds == float("inf"):
            self.journal.violated("an engine comes back", f"no 200 within {limit:g} s of {what}", struck)


Fault = Callable[[Field, random.Random], Awaitable[None]]


# -- the engine process ------------------------------------------------------------------------------------------


async def kill_engine(field: Field, rng: random.Random) -> None:
    await _killed(field, "kill -9 of the engine process")


async def _killed(field: Field, what: str) -> None:
    async with field.alone:
        pid = field.server.engine_pid
        with field.journal.window(what):
            await _until_back(field, what, pid)


async def _until_back(field: Field, what: str, pid: int) -> None:
    field.journal.did(f"{what} (pid {pid})")
    struck = time.perf_counter()
    if pid and field.strike(pid, signal.SIGKILL):
        await field.tells_the_truth(struck, what)
    limit = TRUTH * field.patience
    down = await field.health.until(lambda status: status != OK, struck, limit)
    await field.recovers(struck + min(down, limit), what, LONGEST_PAUSE + START)


async def stop_engine(field: Field, rng: random.Random) -> None:
    """Stops the engine for a time that may exceed --engine-timeout, and continues it."""
    seconds = rng.uniform(0.2, 6.0)
    what = f"SIGSTOP of the engine process for {seconds:.1f} s"
    async with field.alone:
        with field.journal.window(what):
            await _stopped(field, what, seconds)


async def _stopped(field: Field, what: str, seconds: float) -> None:
    pid, struck = field.server.engine_pid, time.perf_counter()
    field.journal.did(f"{what} (pid {pid})")
    if not pid or not field.strike(pid, signal.SIGSTOP):
        return
    timeout = TIMEOUT * field.patience
    told = seconds > timeout / 2 + SLACK
    truth = asyncio.create_task(field.tells_the_truth(struck, what)) if told else None
    await asyncio.sleep(seconds)
    thawed = time.perf_counter()
    field.strike(pid, signal.SIGCONT)
    if truth:
        await truth
    if seconds < timeout - SLACK:
        await field.recovers(thawed, f"the end of {what}", TRUTH)
        if field.server.engine_pid != pid:
            field.journal.violated("an engine that thaws in time goes on", f"replaced after {what}", struck)
    else:
        await asyncio.sleep(SLACK)
        await field.recovers(time.perf_counter(), what, LONGEST_PAUSE + START)


async def damage_kernels(field: Field, rng: random.Random) -> None:
    """Empties, halves, flips or deletes compiled kernels; the next engine must start and serve as before."""
    files = field.disk.kernels()
    chosen = rng.sample(files, rng.randint(1, len(files))) if files else []
    how = rng.choice(("emptied", "halved", "flipped", "deleted"))
    field.journal.did(f"{len(chosen)} of {len(files)} files of kernels {how}")
    for path in chosen:
        with contextlib.suppress(OSError):
            data = path.read_bytes()
            path.unlink()  # a running engine may have mapped the file
            if how != "deleted":
                path.write_bytes(_damaged(data, how, rng))
    await _killed(field, f"kill -9 of the engine process, its kernels {how}")


def _damaged(data: bytes, how: str, rng: random.Random) -> bytes:
    if how == "emptied" or not data:
        return b""
    if how == "halved":
        return data[:len(data) // 2]
    place = rng.randrange(len(data))
    return data[:place] + bytes([data[place] ^ 0xFF]) + data[place + 1:]


# -- other processes ---------------------------------------------------------------------------------------------


async def stop_api(field: Field, rng: random.Random) -> None:
    """Stops the API process; its engine must not count as lost."""
    seconds, pid = rng.uniform(0.1, 1.0), field.server.process.pid
    what = f"SIGSTOP of the API process for {seconds:.1f} s"
    async with field.alone:
        engine = field.server.engine_pid
        with field.journal.window(what):
            field.journal.did(what)
            field.strike(pid, signal.SIGSTOP)
            await asyncio.sleep(seconds)
            field.strike(pid, signal.SIGCONT)
            thawed = time.perf_counter()
            await field.recovers(thawed, f"the end of {what}", TRUTH)
            if field.server.engine_pid != engine:
                field.journal.violated("an engine survives a pause of the API process", f"replaced after {what}",
                                       thawed)


async def fill_disk(field: Field, rng: random.Random) -> None:
    """Fills the disk of event log, caches and temporary files; requests must not be affected."""
    seconds = rng.uniform(1.0, 5.0)
    field.journal.did(f"the disk is full for {seconds:.1f} s")
    try:
        await asyncio.to_thread(field.disk.fill, field.family)
        if rng.random() < 0.3:
            await _killed(field, "kill -9 of the engine process, the disk full")
        await asyncio.sleep(seconds)
    finally:
        field.disk.free(field.family)
        field.journal.did("the disk has space again")


async def kill_others(field: Field, rng: random.Random) -> None:
    """Kills a descendant of the API process that is not the engine."""
    others = [pid for pid in descendants(field.server.process.pid) if pid != field.server.engine_pid]
    if not others:
        field.journal.did("no other process to kill")
        return
    pid = rng.choice(others)
    what = f"kill -9 of {command(pid)[:120]!r}"
    async with field.alone:
        field.journal.did(what)
        with field.journal.window(what):
            field.strike(pid, signal.SIGKILL)
            await asyncio.sleep(1.0)
            await field.recovers(time.perf_counter(), what, LONGEST_PAUSE + START)


async def silent_crowd(field: Field, rng: random.Random) -> None:
    """Opens many connections that send nothing or an incomplete head, and keeps them open."""
    seconds, number = rng.uniform(2.0, 8.0), rng.randint(100, CROWD)
    field.journal.did(f"{number} silent connections for {seconds:.1f} s")
    place = place_of(field.server)
    crowd: list[socket.socket] = []
    try:
        for count in range(number):
            with contextlib.suppress(OSError):
                crowd.append(connection(place, rng))
            if count % 20 == 0:
                await asyncio.sleep(0)
        await asyncio.sleep(seconds)
    finally:
        for one in crowd:
            one.close()


BEGINNINGS = (b"", b"G", b"GET /health HTTP/1.1\r\nHost: x\r\nX-A: ",
              b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
              b"Content-Length: 4000\r\n\r\n{\"prompt\"")


def place_of(server: Server) -> tuple[str, int]:
    """Returns the server's host and port."""
    url = urlsplit(server.url)
    return url.hostname or "", url.port or 0


def connection(place: tuple[str, int], rng: random.Random) -> socket.socket:
    """Returns a connection from another address, which has sent nothing or an incomplete head.  Reads no response.

    Raises:
        OSError: no connection is possible.
    """
    one = socket.socket()
    try:
        one.bind((f"127.0.1.{1 + rng.randrange(SOURCES)}", 0))
        one.setblocking(False)
        one.connect_ex(place)
        with contextlib.suppress(BlockingIOError):
            one.send(rng.choice(BEGINNINGS))
    except OSError:
        one.close()
        raise
    return one


LOSING: dict[Fault, int] = {kill_engine: 2, stop_engine: 3, damage_kernels: 1}  # weights
HARMLESS: dict[Fault, int] = {stop_api: 3, fill_disk: 2, kill_others: 1, silent_crowd: 2}


def drawn(rng: random.Random, among: dict[Fault, int]) -> Fault:
    return rng.choices(list(among), list(among.values()))[0]
