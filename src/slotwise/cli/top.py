"""slotwise top: a server's batch in a terminal, live."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from math import isfinite
from typing import TYPE_CHECKING

from slotwise.cli.numbers import Number
from slotwise.cli.options import Commands, add_command
from slotwise.core.ranges import real

if TYPE_CHECKING:
    import aiohttp

    from slotwise.observe.live_state import LiveState

MAX_LINE = 8 << 20  # bytes of an entry: the tokens of a whole static batch are in one
SETTLES = 0.3  # seconds without an entry after which the backlog is complete
BACKLOG = 2.0  # seconds that the backlog may take to arrive
PATIENCE = 15.0  # seconds that --once waits for a server's first entry
CONNECTS = 5.0  # seconds
AGAIN = 1.0  # seconds until a lost server is tried again
LEAVES, HINT = b"q", "q quits"
MAX_KEYS = 64  # bytes read at a time


class TopError(RuntimeError):
    """There is nothing to show; the message is one line that says why."""


def add(commands: Commands) -> None:
    top = add_command(commands, "top", "watch a server's slots, queue, cache and rates in the terminal", run)
    top.add_argument("url", nargs="?", default="http://127.0.0.1:8000", metavar="URL",
                     help="address of the server (default: http://127.0.0.1:8000)")
    top.add_argument("--api-key", default=os.environ.get("SLOTWISE_API_KEY", "").partition(",")[0], metavar="KEY",
                     help="key to send as a bearer token (default: $SLOTWISE_API_KEY)")
    top.add_argument("--once", action="store_true", help="print one frame and end, as without a terminal")
    top.add_argument("--interval", type=Number(real(0.05, 60)), default=0.5, metavar="SECONDS",
                     help="time between two frames (default: 0.5)")


def run(asked: argparse.Namespace) -> int:
    if not asked.url.startswith(("http://", "https://")):
        raise ValueError(f"a server's URL begins with http:// or https://, and {asked.url!r} does not")
    watch = Watch(asked.url.rstrip("/"), asked.api_key)
    asyncio.run(_once(watch) if asked.once or not sys.stdout.isatty() else _live(watch, asked.interval))
    return 0


class Watch:
    """A `LiveState` that follows a server's `/events`."""

    def __init__(self, url: str, api_key: str) -> None:
        from slotwise.observe.live_state import LiveState

        self.url = url
        self.state: LiveState = LiveState()
        self.trouble = ""  # why no entries arrive
        self.heard = 0.0  # time of the last entry: seconds, on this machine's clock
        self._connected = 0.0  # time of the connection, likewise
        self._date = 0.0  # seconds, on the server's calendar, when connected
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def now_ns(self) -> int:
        """Now on the server's clock: its latest entry, or its date at the connection, plus the time since."""
        now = time.monotonic()
        ours = self.state.now_ns + (now - self.heard) * 1e9
        if (run := self.state.run) is None or not self._date:
            return int(ours)
        theirs = run.started_ns + (self._date - run.started_unix + now - self._connected) * 1e9
        return int(max(ours, theirs) if isfinite(theirs) else ours)

    async def follow(self) -> None:
        """Read entries until the server ends the stream.

        Raises:
            TopError: the server cannot be reached, or refuses.
        """
        import aiohttp
        from aiohttp.http_exceptions import HttpProcessingError

        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECTS)
        try:
            async with (aiohttp.ClientSession(timeout=timeout, headers=self._headers, read_bufsize=MAX_LINE) as session,
                        session.get(f"{self.url}/events") as response):
                await self._check(response)
                self._date, self._connected = _date(response.headers.get("date", "")), time.monotonic()
                await self._read(response.content)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise TopError(f"{self.url} cannot be reached: {error or type(error).__name__}") from error
        except HttpProcessingError as error:  # no ClientError: a line without end
            raise TopError(f"{self.url}/events sends a line of more than {2 * MAX_LINE >> 20} MB: it is no slotwise "
                           "server") from error

    async def _check(self, response: aiohttp.ClientResponse) -> None:
        if response.status == HTTPStatus.UNAUTHORIZED:
            raise TopError(f"{self.url} asks for a key: --api-key")
        if response.status != HTTPStatus.OK:
            raise TopError(f"{self.url}/events answers with {response.status} {response.reason}")

    async def _read(self, lines: aiohttp.StreamReader) -> None:
        from slotwise.observe.event_log import decode

        async for line in lines:
            self.trouble = ""
            self.heard = time.monotonic()
            if line.strip():
                self.state.apply(decode(line))


def _date(header: str) -> float:
    """Seconds since the epoch; 0 when there is no date."""
    try:
        return parsedate_to_datetime(header).timestamp()
    except (ValueError, OverflowError):
        return 0.0


async def _once(watch: Watch) -> None:
    """Print one frame when the backlog has arrived: it comes at once, later entries step by step."""
    from rich.console import Console

    from slotwise.cli.top_frame import Frame

    following = asyncio.create_task(watch.follow())
    ends = time.monotonic() + PATIENCE
    while not following.done() and (now := time.monotonic()) < ends:
        if watch.heard:
            ends = min(ends, now + BACKLOG)
            if now - watch.heard > SETTLES:
                break
        await asyncio.sleep(SETTLES / 10)
    if following.done():
        following.result()
    following.cancel()
    console = Console()
    console.print(Frame(watch.state, watch.now_ns(), most_rows=10_000, trouble=watch.trouble))


async def _live(watch: Watch, interval: float) -> None:
    from rich.live import Live

    from slotwise.cli.top_frame import Frame

    following = asyncio.create_task(_follow_on(watch))
    try:
        with keys_read() as leaving, Live(screen=True, auto_refresh=False) as live:
            left = asyncio.create_task(leaving.wait())
            while not following.done() and not left.done():
                height = live.console.size.height
                live.update(Frame(watch.state, watch.now_ns(), height, watch.trouble, HINT), refresh=True)
                await asyncio.wait((following, left), timeout=interval, return_when=asyncio.FIRST_COMPLETED)
        if following.done():
            following.result()
    finally:
        following.cancel()


@contextlib.contextmanager
def keys_read() -> Iterator[asyncio.Event]:
    """Within this context stdin's terminal passes on each key at once, and the event is set when one of them is `q`.

    It is also set when that terminal is gone, and on SIGTERM.  The terminal's settings are restored in any case.
    """
    loop, leaving = asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, leaving.set)
    if not sys.stdin.isatty():
        yield leaving
        return
    terminal = sys.stdin.fileno()

    def read() -> None:
        try:
            keys = os.read(terminal, MAX_KEYS)
        except OSError:  # no terminal is there any more
            keys = b""
        if not keys or LEAVES in keys.lower():
            loop.remove_reader(terminal)
            leaving.set()

    before = termios.tcgetattr(terminal)
    try:
        tty.setcbreak(terminal)
        loop.add_reader(terminal, read)
        yield leaving
    finally:
        loop.remove_reader(terminal)
        with contextlib.suppress(termios.error):
            termios.tcsetattr(terminal, termios.TCSADRAIN, before)


async def _follow_on(watch: Watch) -> None:
    """Follow through restarts of the server; raises TopError if it was never reached."""
    while True:
        try:
            await watch.follow()
            watch.trouble = f"{watch.url} has ended the stream"
        except TopError as error:
            if not watch.heard:
                raise
            watch.trouble = str(error)
        await asyncio.sleep(AGAIN)
