"""The frame of `slotwise top`: the gauges, the slots, and the queue.

A frame takes the width it is given: phrases move to the next line whole, and a narrow terminal leaves out columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from slotwise.errors import printable
from slotwise.observe.live_state import HELD, STALLED, LiveState
from slotwise.observe.request_timeline import DECODE, PREFILL, RequestTimeline
from slotwise.terminal import plain

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
class Frame:
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
class Replica:
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
    replicas: Sequence[Replica]
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


def _of_replica(one: Replica) -> Mapping[str, str]:
    state, rates = one.state, one.state.rates(one.now_ns)
    return {"replica": one.name, "state": state.down or one.condition, "slots": f"{state.num_running} of {state.slots}",
            "waiting": str(state.num_waiting), "cache": f"{state.usage:.0%}",
            "tokens/s": f"{rates.output_tokens:,.0f}", "requests/s": f"{rates.requests:.1f}",
            "empty": f"{rates.empty:.0%}", "wasted": f"{rates.wasted:.0%}"}


def _of_all(replicas: Sequence[Replica]) -> Mapping[str, str]:
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
