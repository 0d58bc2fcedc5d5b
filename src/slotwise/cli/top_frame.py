"""The frame of `slotwise top`: the gauges, the slots, and the queue."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from slotwise.errors import printable
from slotwise.observe.live_state import HELD, STALLED, LiveState
from slotwise.observe.request_timeline import DECODE, PREFILL, RequestTimeline
from slotwise.terminal import plain

STYLES = {PREFILL: "cyan", DECODE: "green", HELD: "bright_black", STALLED: "yellow"}
HEADER_ROWS = 10  # lines around the table of slots
GAUGE_WIDTH = 24
TEXTS = ("request", "doing", "progress")  # columns without numbers
MOST_WAITING = 3  # requests named in the last line


def frame(state: LiveState, now_ns: int, most_rows: int, trouble: str = "") -> RenderableType:
    """A frame of at most about `most_rows` lines, as of `now_ns` on the server's clock."""
    if state.run is None:
        return plain(trouble or "waiting for a first word from the server ...", "bold")
    parts: list[RenderableType] = [_title(state, trouble), _gauges(state), _rates(state, now_ns)]
    seated = state.seated()
    most_slots = max(3, most_rows - HEADER_ROWS)
    if seated:
        parts.append(_slots(state, seated[:most_slots], now_ns))
    if len(seated) > most_slots:
        parts.append(Text(f"  and {len(seated) - most_slots} more", style="dim"))
    parts.append(_queue(state, now_ns))
    return Group(*parts)


def _title(state: LiveState, trouble: str) -> Text:
    run = state.run
    assert run is not None and state.scheduling is not None
    batching = state.scheduling.batching
    kind = f"{batching.kind} ({batching.prefill})" if batching.prefill else batching.kind
    step = f"step {state.last.step}" if state.last is not None else "no step yet"
    title = Text.assemble(("slotwise ", "bold"), plain(
        f"{run.version}  {Path(run.model).name} on {run.device} ({run.dtype})  {kind} batching  {step}"))
    if why := trouble or state.down:
        title.append("\n").append_text(plain(why, "bold red"))
    return title


def _gauges(state: LiveState) -> Table:
    gauges = Table.grid(padding=(0, 2))
    for _ in range(3):
        gauges.add_column(no_wrap=True)
    gauges.add_row("slots", _bar(state.num_running, state.slots, "green"), f"{state.num_running} of {state.slots}")
    gauges.add_row("cache", _bar(state.usage, 1, "blue"), f"{state.usage:.0%} of {state.run.limits.num_blocks} blocks"
                   if state.run is not None else "")
    reasons = ", ".join(f"{count} {reason}" for reason, count in state.waiting.by_reason().items() if count)
    gauges.add_row("waiting", _bar(state.num_waiting, max(state.num_waiting, state.slots), "yellow"),
                   plain(f"{state.num_waiting}" + (f": {reasons}" if reasons and state.num_waiting else "")))
    return gauges


def _bar(value: float, whole: float, style: str) -> ProgressBar:
    return ProgressBar(total=max(whole, 1e-9), completed=value, width=GAUGE_WIDTH, complete_style=style,
                       finished_style=style)


def _rates(state: LiveState, now_ns: int) -> Text:
    rates = state.rates(now_ns)
    return Text(f"{rates.output_tokens:,.0f} tokens/s out, {rates.prompt_tokens:,.0f} in   "
                f"{rates.requests:.1f} requests/s   {rates.steps:.1f} steps/s of {rates.step_seconds * 1e3:.1f} ms and "
                f"{rates.step_tokens:.1f} tokens   {rates.empty:.0%} of slots empty   {rates.wasted:.0%} wasted")


def _slots(state: LiveState, seated: Sequence[RequestTimeline], now_ns: int) -> Table:
    table = Table(box=None, padding=(0, 1), header_style="dim", expand=False)
    for name in ("slot", "request", "doing", "progress", "prompt", "cached", "output", "for"):
        table.add_column(name, justify="left" if name in TEXTS else "right", no_wrap=True)
    for live in seated:
        phase = state.phase(live)
        style = STYLES.get(phase, "")
        table.add_row(
            str(live.slot), Text(_name(live)), plain(state.reason(live) or phase, style), _progress(live, phase, style),
            str(live.request.num_prompt), str(live.cached or ""), str(live.num_sampled),
            f"{max(0, now_ns - live.request.ns) * 1e-9:.1f} s")
    return table


def _progress(live: RequestTimeline, phase: str, style: str) -> ProgressBar:
    """Of the prompt during prefill, then of the longest output allowed, if that is known."""
    request = live.request
    if phase == PREFILL:
        return ProgressBar(total=request.num_prompt, completed=min(live.computed, request.num_prompt), width=16,
                           complete_style=style, finished_style=style)
    most = request.output_tokens or request.params.max_tokens or live.num_sampled
    return ProgressBar(total=max(1, most), completed=live.num_sampled, width=16, complete_style=style,
                       finished_style=style)


def _name(live: RequestTimeline) -> str:
    name = printable(live.request.id)
    return name if len(name) <= 24 else f"{name[:16]}…{name[-7:]}"


def _queue(state: LiveState, now_ns: int) -> Text:
    queue = state.queue()
    if not queue:
        return Text("no requests wait", style="dim")
    named = "   ".join(f"{_name(live)} {(now_ns - live.request.ns) * 1e-9:.1f} s {state.reason(live)}"
                       for live in queue[:MOST_WAITING])
    more = f"   and {len(queue) - MOST_WAITING} more" if len(queue) > MOST_WAITING else ""
    return plain(f"waiting   {named}{more}")
