"""slotwise explain, replay and timeline: what a recorded event log says."""

from __future__ import annotations

import argparse
import os
import stat
import sys
import webbrowser
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from slotwise.cli.options_of_settings import Commands, Number, add_command
from slotwise.cli.simulations import add_changes_option, counterfactual
from slotwise.core.drafting import DRAFT_LIMITS
from slotwise.core.setting_fields import whole
from slotwise.measure.simulate.figures import LatencyLimits
from slotwise.measure.simulate.replay import Outcome, replay
from slotwise.measure.simulate.what_if import what_if
from slotwise.observe import event_log, log_file
from slotwise.observe.event_log import Entry, LogError
from slotwise.observe.explain import MS, PARTS, Explanation, explain
from slotwise.observe.explain_words import cache_sentence
from slotwise.observe.fold import gather
from slotwise.observe.log_file import read_file
from slotwise.observe.request_timeline import RequestTimeline
from slotwise.observe.step_time_store import ObservedStepTimes
from slotwise.observe.step_view import StepView, step_view, times_of
from slotwise.observe.timeline import page_builder as page
from slotwise.platform.files import PRIVATE, write_output
from slotwise.platform.terminal import plain

SLOWEST = 10
FILE_WIDTH = 160  # columns of the tables where they are not shown in a terminal
WIDEST_ID = 24  # characters of an id in a table
MOST_LEFT_OUT = 64  # lines of requests that did not run
TINY = 0.0005  # of the total: smaller parts have no column


def add(commands: Commands) -> None:
    _add_explain(commands)
    _add_replay(commands)
    _add_timeline(commands)


def _add_explain(commands: Commands) -> None:
    command = add_command(commands, "explain", "divide the time of requests in an event log into parts", run_explain)
    command.add_argument("log", metavar="LOG", help="a file written by --event-log")
    command.add_argument("request", nargs="?", metavar="REQUEST",
                         help="an X-Request-Id, a response's id, or the number of a request in the log")
    what = command.add_mutually_exclusive_group()
    what.add_argument("--slowest", type=Number(whole(1, 1_000_000)), nargs="?", const=SLOWEST, metavar="N",
                      help=f"the N requests that took longest, part by part (default: {SLOWEST})")
    what.add_argument("--step", type=Number(whole(0, 2**53)), metavar="N",
                      help="the rows of step N, the requests without one, and why")
    add_changes_option(command)


def run_explain(asked: argparse.Namespace) -> int:
    if asked.request is not None and (asked.slowest is not None or asked.step is not None):
        raise ValueError("give a request, --slowest or --step")
    if asked.changes and asked.request is None:
        raise ValueError("--set tells when a request would have had its first token: name one")
    entries = list(read_file(asked.log))
    timelines, times = gather(entries), times_of(entries)
    console = Console(width=None if sys.stdout.isatty() else FILE_WIDTH)
    if asked.step is not None:
        _show_step(console, step_view(entries, asked.step, times), timelines)
    elif asked.request is not None:
        name = asked.request
        found = [one for one in timelines.values() if name == str(one.request.number) or one.is_named(name)]
        if not found:
            raise LogError(f"no request in {asked.log} is called {asked.request!r}")
        counterfactuals = [_counterfactual(entries, one.request.id, asked) for one in found] if asked.changes else []
        for one in found:
            _show_explanation(console, explain(one, entries, times))
        for sentence in counterfactuals:
            console.print(plain(sentence))
    else:
        _show_slowest(console, asked.slowest or SLOWEST, entries, (timelines, times))
    console.print(plain(f"step times: median error {times.error:.1%} over the log's last steps", "dim"))
    return 0


def _ms(ns: float) -> str:
    return f"{ns * MS:,.2f}"


def _counterfactual(entries: Sequence[Entry], request_id: str, asked: argparse.Namespace) -> str:
    return counterfactual(what_if(entries, dict(asked.changes), LatencyLimits(), request_id)["request"], asked.changes)


def _show_explanation(console: Console, explanation: Explanation) -> None:
    timeline, total = explanation.timeline, explanation.total_ns
    table = Table("part", "why", title=plain(_heading(explanation)), title_justify="left")
    for name in ("ms", "share", "steps"):
        table.add_column(name, justify="right")
    table.add_column("which is")
    for share in explanation.shares:
        table.add_row(
            share.part.replace("_", " "), plain(share.reason.replace("_", " ")), _ms(share.ns),
            f"{share.ns / total:.1%}" if total else "", _steps(share.first_step, share.last_step),
            PARTS[share.part], style="" if share.ns > total * TINY else "dim")
    table.add_section()
    table.add_row("all", "", _ms(total), "100.0%" if total else "", "", "as its client waited" if timeline.ended else
                  "so far: the log ends before it does")
    console.print(table)
    if said := cache_sentence(explanation.cache):
        console.print(plain(said))


def _heading(explanation: Explanation) -> str:
    timeline = explanation.timeline
    parts = [f"request {timeline.request.number} ({timeline.request.id})",
             f"{timeline.request.num_prompt} prompt tokens, {explanation.num_cached} of them cached",
             f"{timeline.num_output} output tokens"]
    if timeline.request.spec.adapter_name:
        parts.insert(1, f"adapter {timeline.request.spec.adapter_name}")
    if explanation.num_preemptions:
        parts.append(f"preempted {explanation.num_preemptions} times")
    if explanation.num_drafts:
        parts.append(f"{explanation.num_accepted} of {explanation.num_drafts} drafts right")
    return "; ".join([*parts, f"ended: {timeline.end_reason}" if timeline.ended else "still running"])


def _steps(first: int, last: int) -> str:
    if first < 0:
        return ""
    return str(first) if first == last else f"{first}-{last}"


def _show_slowest(console: Console, most: int, entries: Sequence[Entry],
                  known: tuple[dict[int, RequestTimeline], ObservedStepTimes]) -> None:
    """One row per request, one column per part that matters."""
    timelines, times = known
    ended = sorted((one for one in timelines.values() if one.ended), key=lambda one: one.total_ns, reverse=True)[:most]
    if not ended:
        raise LogError("no request has ended in this log")
    explanations = [explain(one, entries, times) for one in ended]
    total = sum(explanation.total_ns for explanation in explanations)
    parts = [part for part in PARTS if sum(explanation.ns(part) for explanation in explanations) > TINY * total]
    table = Table("request", "ended", title=f"The {len(explanations)} slowest of {len(timelines)} requests, in ms",
                  title_justify="left")
    for part in ("total", *parts):
        table.add_column(part.replace("_", " "), justify="right")
    for explanation in explanations:
        request = explanation.timeline.request
        table.add_row(plain(f"{request.number} {request.id[:WIDEST_ID]}"), plain(explanation.timeline.end_reason),
                      _ms(explanation.total_ns),
                      *(_ms(explanation.ns(part)) for part in parts))
    table.add_section()
    table.add_row("all of them", "", _ms(total),
                  *(_ms(sum(explanation.ns(part) for explanation in explanations)) for part in parts))
    table.add_row("share", "", "",
                  *(f"{sum(explanation.ns(part) for explanation in explanations) / total:.1%}" for part in parts))
    console.print(table)


def _show_step(console: Console, shown: StepView, timelines: dict[int, RequestTimeline]) -> None:
    step, plan, counters = shown.step, shown.step.plan, shown.step.counters
    console.print(
        f"Step {step.step}: {len(shown.rows)} rows, {sum(plan.counts)} tokens and {sum(plan.padding)} of padding in "
        f"{(step.ended_ns - step.started_ns) * MS:.3f} ms (predicted {shown.predicted * 1e3:.3f}); then "
        f"{counters.num_running} running, {counters.num_waiting} waiting, {counters.num_free_blocks} blocks free")
    if plan.drafts or plan.draft_limit:
        num_drafts, num_right = (sum(counts) for counts in zip((0, 0), *step.verified, strict=True))
        console.print(plain(f"{num_drafts} drafts, {num_right} of them right; no more: {_in_words(plan.draft_limit)}"))
    if step.result.proposing is not None:
        seconds, passes, tokens = step.result.proposing
        console.print(f"The draft model took {seconds * 1e3:.3f} ms, {passes} passes and {tokens} tokens")
    ran = Table("request", "slot", "computed", "what", "joined", title="Rows", title_justify="left")
    for row in shown.rows:
        joined = "" if row.cached < 0 else f"now, {row.cached} tokens cached" if row.cached else "now"
        ran.add_row(
            plain(_name(row.number, timelines)), str(row.slot), f"{row.num_tokens} from {row.start}", row.what, joined)
    console.print(ran)
    out = Table("request", "state", "why not", title="Left out", title_justify="left")
    for one in shown.left_out[:MOST_LEFT_OUT]:
        out.add_row(plain(_name(one.number, timelines)), one.state, plain(one.reason.replace("_", " ")))
    console.print(out if shown.left_out else "No other request was unfinished.")
    if len(shown.left_out) > MOST_LEFT_OUT:
        console.print(f"... and {len(shown.left_out) - MOST_LEFT_OUT} more")
    for end in step.ended:
        console.print(plain(
            f"{_name(end.request_id, timelines)} ended: {end.reason}, {end.num_output} tokens {end.message}"))


def _in_words(draft_limit: str) -> str:
    return DRAFT_LIMITS.get(draft_limit, draft_limit.replace("_", " "))


def _name(number: int, timelines: dict[int, RequestTimeline]) -> str:
    return f"{number} {timelines[number].request.id[:WIDEST_ID]}" if number in timelines else str(number)


DIFFERENT = 1  # exit status


def _add_replay(commands: Commands) -> None:
    command = add_command(commands, "replay", "replay an event log, and compare every record", run_replay)
    command.add_argument("log", help="a file written by `slotwise serve --event-log FILE`")


def run_replay(asked: argparse.Namespace) -> int:
    outcome = replay(read_file(asked.log))
    Console().print(_table(outcome))
    return 0 if outcome.difference is None else DIFFERENT


def _table(outcome: Outcome) -> Table:
    table = Table(show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, number in (("engines", outcome.engines), ("requests", outcome.requests), ("steps", outcome.steps),
                         ("computed tokens", outcome.tokens), ("identical records", outcome.records)):
        table.add_row(name, f"{number:,}")
    difference = outcome.difference
    if difference is None:
        table.add_row("replayed", "to the end, byte for byte")
        return table
    table.add_row("first difference", plain(f"record {difference.record}, step {difference.step}: {difference.field}"))
    table.add_row("recorded", plain(difference.logged))
    table.add_row("replayed", plain(difference.replayed))
    return table


def _add_timeline(commands: Commands) -> None:
    timeline = add_command(
        commands, "timeline", "draw a saved event log as a page that opens in any browser", run_timeline)
    timeline.add_argument("log", type=Path, metavar="LOG", help="a file written by `slotwise serve --event-log LOG`")
    timeline.add_argument("--output", type=Path, metavar="FILE", help="the page (default: LOG.html next to the log)")
    timeline.add_argument("--open", action="store_true", help="show it in the browser")


def run_timeline(asked: argparse.Namespace) -> int:
    output: Path = asked.output or asked.log.with_name(asked.log.name + ".html")
    if asked.log.is_file() and output.exists() and os.path.samefile(asked.log, output):
        raise ValueError(f"--output {output} is the log itself: name another file")
    write_output(output, page.saved(asked.log.name, _drawn(asked.log)), _mode(asked.log))
    print(f"wrote {output}")
    if asked.open:
        webbrowser.open(output.resolve().as_uri())
    return 0


def _mode(log: Path) -> int:
    """The mode of a page: it holds what the log holds, so the same users may read it; only the owner, of a pipe."""
    return stat.S_IMODE(log.stat().st_mode) & 0o666 if log.is_file() else PRIVATE


def _drawn(path: Path) -> Iterator[bytes]:
    """The entries of a log, checked, without prompts, salts and tenants, which are not drawn."""
    for entry in log_file.read_file(path):
        if isinstance(entry, event_log.RequestEntry):
            entry = entry.replace_spec(entry.spec.public())
        yield event_log.encode(entry) + b"\n"
