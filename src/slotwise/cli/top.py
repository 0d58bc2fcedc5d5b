"""slotwise top: a live view of a server in the terminal."""

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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from slotwise.cli.options_of_settings import Commands, Number, add_command
from slotwise.core.setting_fields import real
from slotwise.errors import printable
from slotwise.observe.live_state import HELD, STALLED, LiveState
from slotwise.observe.request_timeline import DECODE, PREFILL, RequestTimeline
from slotwise.platform.terminal import plain

if TYPE_CHECKING:
    import aiohttp
    from rich.console import RenderableType

    from slotwise.observe.live_state import LiveState

STYLES = {PREFILL: "cyan", DECODE: "green", HELD: "bright_black", STALLED: "yellow"}
NARROW = 80  # columns of a terminal below which gauges are half as long
GAUGE_WIDTH = 24
TEXTS = ("request", "doing", "progress")  # columns without numbers
WIDTHS = {"slot": 4, "request": 16, "doing": 13, "progress": 16, "prompt": 6, "cached": 6, "output": 6, "for": 8}
LONGEST_NAME = 24
OMITTED = ("cached", "prompt", "progress", "output", "for")  # columns that a narrow terminal leaves out, in this order
LEAST_ROWS = 1  # slots shown in any case
AROUND_SLOTS = 2  # lines: the head of the table, and the number of further slots
MOST_WAITING = 3  # requests named in the last line
BETWEEN = "   "  # phrases of a line


@dataclass(frozen=True)
class ServerFrame:
    """A frame of at most about `most_rows` lines, as of `now_ns` on the server's clock.

    Args:
        trouble: why no entries arrive; empty while they do.
        hint: how to leave; empty where no key is read.
    """

    state: LiveState
    now_ns: int
    most_rows: int
    trouble: str = ""
    hint: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        state, width = self.state, options.max_width
        hint = [Text(self.hint, style="dim")] if self.hint else []
        if state.run is None:
            yield _flow([plain(self.trouble or "waiting for a first word from the server ...", "bold"), *hint], width)
            return
        head = (_title(state, self.trouble, hint, width), _gauges(state, width), _rates(state, self.now_ns, width))
        queue = _queue(state, self.now_ns, width)
        used = sum(len(console.render_lines(part, options)) for part in (*head, queue))
        running, most_slots = state.seated(), max(LEAST_ROWS, self.most_rows - used - AROUND_SLOTS)
        yield from head
        if running:
            yield _slots(state, running[:most_slots], self.now_ns, width)
        if len(running) > most_slots:
            yield Text(f"  and {len(running) - most_slots} more", style="dim")
        yield queue


@dataclass(frozen=True)
class ReplicaStatus:
    """One replica behind a router."""

    name: str
    condition: str  # up, draining or down
    state: LiveState
    now_ns: int  # on its clock


@dataclass(frozen=True)
class RouterFrame:
    """A line for each replica behind a router, and one for all.

    Args:
        trouble: why the router does not answer; empty while it does.
        hint: how to leave; empty where no key is read.
    """

    url: str
    replicas: Sequence[ReplicaStatus]
    trouble: str = ""
    hint: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        up = sum(one.condition == "up" for one in self.replicas)
        hint = [Text(self.hint, style="dim")] if self.hint else []
        yield _flow([Text("slotwise router", style="bold"), plain(self.url),
                     Text(f"{up} of {len(self.replicas)} replicas up"), *hint], options.max_width)
        if self.trouble:
            yield plain(self.trouble, "bold red")
        table = Table(box=None, padding=(0, 1), header_style="dim", expand=False)
        lines = [*map(_of_replica, self.replicas), *([_of_all(self.replicas)] if len(self.replicas) > 1 else [])]
        columns = _fitting(lines, options.max_width)
        for name in columns:
            table.add_column(name, justify="left" if name in ("replica", "state") else "right", no_wrap=True)
        for number, line in enumerate(lines):
            table.add_row(*(plain(line.get(name, ""), "bold" * (number == len(self.replicas))) for name in columns))
        yield table
        yield Text("the batch of one: --replica NAME", style="dim")


OF_REPLICA = ("replica", "state", "slots", "waiting", "cache", "tokens/s", "requests/s", "empty", "wasted")
OMITTED_OF_REPLICA = ("empty", "wasted", "requests/s", "cache")  # that a narrow terminal leaves out, in this order


def _fitting(lines: Sequence[Mapping[str, str]], width: int) -> list[str]:
    """Returns the columns that fit."""
    widths = {name: 2 + max(len(name), *(len(line.get(name, "")) for line in lines), 0) for name in OF_REPLICA}
    for name in OMITTED_OF_REPLICA:
        if sum(widths.values()) <= width:
            break
        del widths[name]
    return list(widths)


def _of_replica(one: ReplicaStatus) -> Mapping[str, str]:
    state, rates = one.state, one.state.rates(one.now_ns)
    return {"replica": one.name, "state": state.down or one.condition, "slots": f"{state.num_running} of {state.slots}",
            "waiting": str(state.num_waiting), "cache": f"{state.usage:.0%}",
            "tokens/s": f"{rates.output_tokens:,.0f}", "requests/s": f"{rates.requests:.1f}",
            "empty": f"{rates.empty:.0%}", "wasted": f"{rates.wasted:.0%}"}


def _of_all(replicas: Sequence[ReplicaStatus]) -> Mapping[str, str]:
    states, rates = [one.state for one in replicas], [one.state.rates(one.now_ns) for one in replicas]
    return {"replica": "all",
            "slots": f"{sum(one.num_running for one in states)} of {sum(one.slots for one in states)}",
            "waiting": str(sum(one.num_waiting for one in states)),
            "tokens/s": f"{sum(one.output_tokens for one in rates):,.0f}",
            "requests/s": f"{sum(one.requests for one in rates):.1f}"}


def _flow(phrases: Sequence[Text], width: int) -> Text:
    """The phrases side by side; one that does not fit begins the next line."""
    flowing, taken = Text(), 0
    for phrase in phrases:
        wider = taken + len(BETWEEN) + phrase.cell_len
        if taken:
            flowing.append(BETWEEN if wider <= width else "\n")
        flowing.append_text(phrase)
        taken = wider if taken and wider <= width else phrase.cell_len
    return flowing


def _title(state: LiveState, trouble: str, hint: Sequence[Text], width: int) -> Text:
    run = state.run
    assert run is not None and state.scheduling is not None
    batching = state.scheduling.batching
    kind = f"{batching.kind} ({batching.prefill})" if batching.prefill else batching.kind
    step = f"step {state.last.step}" if state.last is not None else "no step yet"
    title = _flow([
        Text.assemble(("slotwise ", "bold"), plain(run.version)),
        *map(plain, (f"{Path(run.model).name} on {run.device} ({run.dtype})", f"{kind} batching", step)), *hint], width)
    if why := trouble or state.down:
        title.append("\n").append_text(plain(why, "bold red"))
    return title


def _gauges(state: LiveState, width: int) -> Table:
    def bar(value: float, whole: float, style: str) -> ProgressBar:
        return _bar(value, whole, style, GAUGE_WIDTH if width >= NARROW else GAUGE_WIDTH // 2)

    gauges = Table.grid(padding=(0, 2))
    for is_text in (False, False, True):
        gauges.add_column(no_wrap=not is_text)
    gauges.add_row("slots", bar(state.num_running, state.slots, "green"), f"{state.num_running} of {state.slots}")
    gauges.add_row("cache", bar(state.usage, 1, "blue"), f"{state.usage:.0%} of {state.run.limits.num_blocks} blocks"
                   if state.run is not None else "")
    reasons = ", ".join(f"{count} {reason}" for reason, count in state.waiting.by_reason().items() if count)
    gauges.add_row("waiting", bar(state.num_waiting, max(state.num_waiting, state.slots), "yellow"),
                   plain(f"{state.num_waiting}" + (f": {reasons}" if reasons and state.num_waiting else "")))
    return gauges


def _bar(value: float, whole: float, style: str, width: int) -> ProgressBar:
    return ProgressBar(total=max(whole, 1e-9), completed=value, width=width, complete_style=style, finished_style=style)


def _rates(state: LiveState, now_ns: int, width: int) -> Text:
    rates = state.rates(now_ns)
    return _flow([Text(phrase) for phrase in (
        f"{rates.output_tokens:,.0f} tokens/s out, {rates.prompt_tokens:,.0f} in", f"{rates.requests:.1f} requests/s",
        f"{rates.steps:.1f} steps/s of {rates.step_seconds * 1e3:.1f} ms and {rates.step_tokens:.1f} tokens",
        f"{rates.empty:.0%} of slots empty", f"{rates.wasted:.0%} wasted")], width)


def _slots(state: LiveState, running: Sequence[RequestTimeline], now_ns: int, width: int) -> Table:
    columns = _columns(width)
    table = Table(box=None, padding=(0, 1), header_style="dim", expand=False)
    for name in columns:
        table.add_column(name, justify="left" if name in TEXTS else "right", no_wrap=True)
    for live in running:
        cells = _cells(state, live, now_ns, columns["request"])
        table.add_row(*(cells[name] for name in columns))
    return table


def _columns(width: int) -> dict[str, int]:
    """The columns that fit, each with its width; the request's name takes what the others leave."""
    columns = dict(WIDTHS)
    for name in OMITTED:
        if sum(columns.values()) + 2 * len(columns) <= width:
            break
        del columns[name]
    columns["request"] += max(0, width - sum(columns.values()) - 2 * len(columns))
    columns["request"] = min(columns["request"], LONGEST_NAME)
    return columns


def _cells(state: LiveState, live: RequestTimeline, now_ns: int, name_width: int) -> Mapping[str, RenderableType]:
    phase = state.phase(live)
    style = STYLES.get(phase, "")
    return {
        "slot": str(live.slot), "request": Text(_name(live, name_width)),
        "doing": plain(state.reason(live) or phase, style), "progress": _progress(live, phase, style),
        "prompt": str(live.request.num_prompt), "cached": str(live.cached or ""), "output": str(live.num_sampled),
        "for": _since(live, now_ns)}


def _since(live: RequestTimeline, now_ns: int) -> str:
    seconds = max(0, now_ns - live.request.ns) * 1e-9
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds / 60:,.0f} min"


def _progress(live: RequestTimeline, phase: str, style: str) -> ProgressBar:
    """Of the prompt during prefill, then of the longest output allowed, if that is known."""
    request, width = live.request, WIDTHS["progress"]
    if phase == PREFILL:
        return _bar(min(live.computed, request.num_prompt), request.num_prompt, style, width)
    most = request.spec.forced_length or request.spec.params.max_tokens or live.num_sampled
    return _bar(live.num_sampled, max(1, most), style, width)


def _name(live: RequestTimeline, width: int) -> str:
    """The request's id in at most `width` characters, of which the middle is left out."""
    name = printable(live.request.id)
    end = (width - 1) // 3
    return name if len(name) <= width else f"{name[:width - 1 - end]}…{name[-end:]}"


def _queue(state: LiveState, now_ns: int, width: int) -> Text:
    queue = state.queue()
    if not queue:
        return Text("no requests wait", style="dim")
    phrases = ["waiting", *(f"{_name(live, LONGEST_NAME)} {_since(live, now_ns)} {state.reason(live)}"
                            for live in queue[:MOST_WAITING])]
    if len(queue) > MOST_WAITING:
        phrases.append(f"and {len(queue) - MOST_WAITING} more")
    return _flow([plain(phrase.rstrip()) for phrase in phrases], width)


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
    router = None if asked.replica else await RouterWatch.at(url, asked.api_key)
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
        return ServerFrame(self.state, self.now_ns(), most_rows, self.trouble, hint)

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
        except HttpProcessingError as error:  # not a ClientError: an endless line
            raise TopError(f"{self.url}/events sends a line of more than {2 * MAX_LINE >> 20} MB: it is not a "
                           "slotwise server") from error

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


class RouterWatch:
    """Follows all replicas behind a router."""

    def __init__(self, url: str, api_key: str) -> None:
        self.url, self._api_key = url, api_key
        self.states: list[dict[str, Any]] = []  # of the replicas, as `GET /replicas` tells
        self.watches: dict[str, Watch] = {}  # by replica
        self.trouble = ""  # why the router does not answer
        self._tasks: dict[str, asyncio.Task[None]] = {}

    @classmethod
    async def at(cls, url: str, api_key: str) -> RouterWatch | None:
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
        now = {name: watch.now_ns() for name, watch in self.watches.items()}
        return RouterFrame(self.url, [
            ReplicaStatus(one["name"], "draining" if one["is_draining"] else "up" if one["is_up"] else "down",
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
    """Returns what an error says, after a colon; "" if slotwise has not answered."""
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


async def _once(watch: Watch | RouterWatch) -> None:
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


async def _live(watch: Watch | RouterWatch, interval: float) -> None:
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
        except OSError:  # the terminal is gone
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


async def _follow_on(watch: Watch | RouterWatch) -> None:
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
