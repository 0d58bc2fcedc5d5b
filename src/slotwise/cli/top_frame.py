"""What `slotwise top` shows: the numbers, the slots, and who waits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from slotwise.observe.board import DECODE, HELD, PREFILL, STALLED, Board, Life

STYLES = {PREFILL: "cyan", DECODE: "green", HELD: "bright_black", STALLED: "yellow"}
HEADER_ROWS = 10  # lines around the table of slots
GAUGE_WIDTH = 24
MOST_WAITING = 3  # named in the last line


def frame(board: Board, now_ns: int, most_rows: int, trouble: str = "") -> RenderableType:
    """A picture of at most about `most_rows` lines, as things stand at `now_ns` on the server's clock."""
    if board.run is None:
        return Text(trouble or "waiting for a first word from the server ...", style="bold")
    parts: list[RenderableType] = [_title(board, trouble), _gauges(board), _rates(board, now_ns)]
    seated = board.seated()
    room = max(3, most_rows - HEADER_ROWS)
    if seated:
        parts.append(_slots(seated[:room], now_ns))
    if len(seated) > room:
        parts.append(Text(f"  and {len(seated) - room} more", style="dim"))
    parts.append(_queue(board.queue(), now_ns))
    return Group(*parts)


def _title(board: Board, trouble: str) -> Text:
    run = board.run
    assert run is not None and board.scheduling is not None
    batching = board.scheduling.batching
    kind = f"{batching.kind} ({batching.prefill})" if batching.prefill else batching.kind
    step = f"step {board.last.step}" if board.last is not None else "no step yet"
    title = Text.assemble(("slotwise ", "bold"), f"{run.version}  {Path(run.model).name} on {run.device} "
                          f"({run.dtype})  {kind} batching  {step}")
    if why := trouble or board.down:
        title.append(f"\n{why}", style="bold red")
    return title


def _gauges(board: Board) -> Table:
    gauges = Table.grid(padding=(0, 2))
    for _ in range(3):
        gauges.add_column(no_wrap=True)
    gauges.add_row("slots", _bar(board.num_running, board.slots, "green"), f"{board.num_running} of {board.slots}")
    gauges.add_row("cache", _bar(board.usage, 1, "blue"), f"{board.usage:.0%} of {board.run.limits.num_blocks} blocks"
                   if board.run is not None else "")
    reasons = ", ".join(f"{count} {reason}" for reason, count in board.waiting.items() if count)
    gauges.add_row("waiting", _bar(board.num_waiting, max(board.num_waiting, board.slots), "yellow"),
                   f"{board.num_waiting}" + (f": {reasons}" if reasons and board.num_waiting else ""))
    return gauges


def _bar(value: float, whole: float, style: str) -> ProgressBar:
    return ProgressBar(total=max(whole, 1e-9), completed=value, width=GAUGE_WIDTH, complete_style=style,
                       finished_style=style)


def _rates(board: Board, now_ns: int) -> Text:
    rates = board.rates(now_ns)
    return Text(f"{rates.output_tokens:,.0f} tokens/s out, {rates.prompt_tokens:,.0f} in   "
                f"{rates.requests:.1f} requests/s   {rates.steps:.1f} steps/s of {rates.step_seconds * 1e3:.1f} ms and "
                f"{rates.step_tokens:.1f} tokens   {rates.empty:.0%} of slots empty   {rates.wasted:.0%} wasted")


def _slots(seated: Sequence[Life], now_ns: int) -> Table:
    table = Table(box=None, padding=(0, 1), header_style="dim", expand=False)
    for name, justify in (("slot", "right"), ("request", "left"), ("doing", "left"), ("progress", "left"),
                          ("prompt", "right"), ("cached", "right"), ("output", "right"), ("for", "right")):
        table.add_column(name, justify=justify, no_wrap=True)
    for life in seated:
        style = STYLES.get(life.phase, "")
        table.add_row(
            str(life.slot), _name(life), Text(life.reason or life.phase, style=style), _progress(life, style),
            str(life.request.num_prompt), str(life.cached or ""), str(life.num_output),
            f"{max(0, now_ns - life.request.ns) * 1e-9:.1f} s")
    return table


def _progress(life: Life, style: str) -> ProgressBar:
    """Of the prompt while it is computed, then of the longest answer that was asked for, if that is known."""
    request = life.request
    if life.phase == PREFILL:
        return ProgressBar(total=request.num_prompt, completed=min(life.computed, request.num_prompt), width=16,
                           complete_style=style, finished_style=style)
    most = request.output_tokens or request.params.max_tokens or life.num_output
    return ProgressBar(total=max(1, most), completed=life.num_output, width=16, complete_style=style,
                       finished_style=style)


def _name(life: Life) -> str:
    return life.request.id if len(life.request.id) <= 24 else f"{life.request.id[:16]}…{life.request.id[-7:]}"


def _queue(queue: Sequence[Life], now_ns: int) -> Text:
    if not queue:
        return Text("nobody waits", style="dim")
    named = "   ".join(f"{_name(life)} {(now_ns - life.request.ns) * 1e-9:.1f} s {life.reason}"
                       for life in queue[:MOST_WAITING])
    more = f"   and {len(queue) - MOST_WAITING} more" if len(queue) > MOST_WAITING else ""
    return Text(f"waiting   {named}{more}")
