"""slotwise top: a server's batch in a terminal, live; of a router all replicas, or the batch of one."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
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
from typing import TYPE_CHECKING, Any

from slotwise.cli.numbers import Number
from slotwise.cli.options import Commands, add_command
from slotwise.core.settings import real

if TYPE_CHECKING:
    import aiohttp
    from rich.console import RenderableType

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
    top.add_argument("--replica", default="", metavar="NAME",
                     help="behind a router: show the batch of this replica (default: a line for every replica)")
    top.add_argument("--once", action="store_true", help="print one frame and end, as without a terminal")
    top.add_argument("--interval", type=Number(real(0.05, 60)), default=0.5, metavar="SECONDS",
                     help="time between two frames (default: 0.5)")


def run(asked: argparse.Namespace) -> int:
    if not asked.url.startswith(("http://", "https://")):
        raise ValueError(f"a server's URL begins with http:// or https://, and {asked.url!r} does not")
    asyncio.run(_run(asked))
    return 0


async def _run(asked: argparse.Namespace) -> None:
    url = asked.url.rstrip("/")
    router = None if asked.replica else await Router.at(url, asked.api_key)
    watch = router or Watch(url, asked.api_key, asked.replica)
    await (_once(watch) if asked.once or not sys.stdout.isatty() else _live(watch, asked.interval))


class Watch:
    """A `LiveState` that follows a server's `/events`.

    Args:
        replica: the one behind a router; "": `url` is a server's.
    """

    def __init__(self, url: str, api_key: str, replica: str = "") -> None:
        from slotwise.observe.live_state import LiveState

        self.url = url
        self.state: LiveState = LiveState()
        self.trouble = ""  # why no entries arrive
        self.heard = 0.0  # time of the last entry: seconds, on this machine's clock
        self._connected = 0.0  # time of the connection, likewise
        self._date = 0.0  # seconds, on the server's calendar, when connected
        self._headers = _headers(api_key)
        self._query = {"replica": replica} if replica else {}

    def frame(self, most_rows: int, hint: str = "") -> RenderableType:
        """What is to be seen now, in at most about `most_rows` lines."""
        from slotwise.cli.top_frame import Frame

        return Frame(self.state, self.now_ns(), most_rows, self.trouble, hint)

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
                        session.get(f"{self.url}/events", params=self._query) as response):
                await self._check(response)
                self._date, self._connected = _date(response.headers.get("date", "")), time.monotonic()
                await self._read(response.content)
        except aiohttp.ClientConnectorError as error:
            why = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or str(error)
            raise TopError(f"{self.url} cannot be reached ({why}): start a server there with slotwise serve, or give "
                           "the URL of one: slotwise top URL") from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise TopError(f"{self.url} cannot be reached: {error or type(error).__name__}") from error
        except HttpProcessingError as error:  # no ClientError: a line without end
            raise TopError(f"{self.url}/events sends a line of more than {2 * MAX_LINE >> 20} MB: it is no slotwise "
                           "server") from error

    async def _check(self, response: aiohttp.ClientResponse) -> None:
        if response.status == HTTPStatus.UNAUTHORIZED:
            raise TopError(f"{self.url} asks for a key: --api-key")
        if response.status != HTTPStatus.OK:
            said = await _message(response)
            raise TopError(f"{self.url}/events answers with {response.status} {response.reason}{said}")

    async def _read(self, lines: aiohttp.StreamReader) -> None:
        from slotwise.observe.event_log import decode

        async for line in lines:
            self.trouble = ""
            self.heard = time.monotonic()
            if line.strip():
                self.state.apply(decode(line))


class Router:
    """Follows all replicas behind a router."""

    def __init__(self, url: str, api_key: str) -> None:
        self.url, self._api_key = url, api_key
        self.states: list[dict[str, Any]] = []  # of the replicas, as `GET /replicas` tells
        self.watches: dict[str, Watch] = {}  # by replica
        self.trouble = ""  # why the router does not answer
        self._tasks: dict[str, asyncio.Task[None]] = {}

    @classmethod
    async def at(cls, url: str, api_key: str) -> Router | None:
        """Returns the router at `url`; None: a server is there, or nothing that answers."""
        found = cls(url, api_key)
        with contextlib.suppress(TopError):
            found.states = await found._ask()
            return found
        return None

    @property
    def heard(self) -> float:
        """Time of the last entry of any replica; 0 until each of those that are up was heard."""
        heard = [self.watches[one["name"]].heard if one["name"] in self.watches else 0.0
                 for one in self.states if one["is_up"]]
        return max(heard) if heard and all(heard) else 0.0

    def frame(self, most_rows: int, hint: str = "") -> RenderableType:
        """What is to be seen now."""
        from slotwise.cli.top_frame import Replica, RouterFrame

        now = {name: watch.now_ns() for name, watch in self.watches.items()}
        return RouterFrame(self.url, [
            Replica(one["name"], "draining" if one["is_draining"] else "up" if one["is_up"] else "down",
                    self.watches[one["name"]].state, now[one["name"]])
            for one in self.states if one["name"] in self.watches][:most_rows], self.trouble, hint)

    async def follow(self) -> None:
        """Follows the replicas until the router cannot be reached.  Raises TopError."""
        try:
            while True:
                self.states = await self._ask()
                self.trouble = ""
                names = [one["name"] for one in self.states]
                for name in names:
                    if name not in self.watches:
                        watch = self.watches[name] = Watch(self.url, self._api_key, name)
                        self._tasks[name] = asyncio.create_task(_keep_following(watch))
                for name in self.watches.keys() - set(names):
                    del self.watches[name]
                    self._tasks.pop(name).cancel()
                await asyncio.sleep(AGAIN)
        finally:
            for task in self._tasks.values():
                task.cancel()
            self._tasks.clear()
            self.watches.clear()

    async def _ask(self) -> list[dict[str, Any]]:
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=2 * CONNECTS, sock_connect=CONNECTS)
        try:
            async with (aiohttp.ClientSession(timeout=timeout, headers=_headers(self._api_key)) as session,
                        session.get(f"{self.url}/replicas") as response):
                if response.status != HTTPStatus.OK or response.content_type != "application/json":
                    raise TopError(f"{self.url}/replicas answers with {response.status} {response.reason}")
                told = b""
                async for part in response.content.iter_any():
                    told += part
                    if len(told) > MAX_LINE:
                        raise TopError(f"{self.url}/replicas sends more than {MAX_LINE >> 20} MB")
                found: list[dict[str, Any]] = json.loads(told)["replicas"]
                return found
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, KeyError, TypeError) as error:
            raise TopError(f"{self.url} cannot be reached: {error or type(error).__name__}") from error


async def _keep_following(watch: Watch) -> None:
    """Follows a replica through all that happens to it."""
    while True:
        with contextlib.suppress(TopError):
            await watch.follow()
        await asyncio.sleep(AGAIN)


def _headers(api_key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


async def _message(response: aiohttp.ClientResponse) -> str:
    """Returns what an error says, behind a colon; "" if that is no answer of slotwise."""
    try:
        return f": {json.loads(await response.content.read(MAX_LINE))['error']['message']}"
    except (ValueError, KeyError, TypeError, OSError):
        return ""


def _date(header: str) -> float:
    """Seconds since the epoch; 0 when there is no date."""
    try:
        return parsedate_to_datetime(header).timestamp()
    except (ValueError, OverflowError):
        return 0.0


async def _once(watch: Watch | Router) -> None:
    """Print one frame when the backlog has arrived: it comes at once, later entries step by step."""
    from rich.console import Console

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
    frame = watch.frame(most_rows=10_000)
    following.cancel()
    console = Console()
    console.print(frame)


async def _live(watch: Watch | Router, interval: float) -> None:
    from rich.live import Live

    following = asyncio.create_task(_follow_on(watch))
    try:
        with keys_read() as leaving, Live(screen=True, auto_refresh=False) as live:
            left = asyncio.create_task(leaving.wait())
            while not following.done() and not left.done():
                height = live.console.size.height
                live.update(watch.frame(height, HINT), refresh=True)
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


async def _follow_on(watch: Watch | Router) -> None:
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
