"""What if: the traffic of a log under other settings, next to the same replay under its own and what was measured.

The replay under the log's own settings shows the error of the method: where it is far from what was measured, so is
what it says of other settings, and the answer begins with that.  A server asks this of the latest part of its ring in
a separate process (`api/generate/what_if_replay.py`), which ends in time and spreads the work: moments of work, and
rests.

    work │ rest ……………… │ work │ rest ……………… │ work        together 5 ms

Helper threads that compute a server's steps poll for work and give their core to any program that wants it, for as long
as the system lets that run.  Even at the lowest priority, a program that works for a second on end takes all of it, and
steps take twice as long.  In moments far shorter than a step it lengthens each by what it takes.  The rests are all of
its politeness: a low priority as well would starve it where other programs use every processor.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf
from types import FrameType, MappingProxyType
from typing import Any, Self, TypeVar

from slotwise.core.scheduler_limits import OBEYING
from slotwise.core.step_time import Work
from slotwise.engine.messages import Add, Command, Configure
from slotwise.measure.simulate.figures import WORDS, LatencyLimits, SimulatedRequest, figures, grouped
from slotwise.measure.simulate.pace import LearnedPace, Pace
from slotwise.measure.simulate.recorded import Recording, read_recording
from slotwise.measure.simulate.simulator import Server, simulate
from slotwise.observe import event_log, log_file

MEASURED, REPLAYED, WHAT_IF = "measured", "replayed", "what_if"
ALL = "all requests"
EVERY = "*"  # all sessions
NO_RETENTION: Mapping[str, float] = MappingProxyType({})
ANY_NUMBER = 1 << 40  # bound on waiting requests and on their prompt tokens: more than any log has
RELIABLE = 0.3  # the largest error of a replay at which its figures stand without a warning
READING, REPLAY = 0.3, 0.35  # shares of the work: a log's lines, and each replay of its traffic

Runs = Mapping[str, Mapping[int, SimulatedRequest]]
PERIOD = 0.005  # seconds of work and the rest behind it: a part of a step
LEAST = 0.05  # of the time, worked; also until enough is done for an estimate of the rest
ESTIMATED = 0.002  # of the work, done


def what_if(
    entries: Iterable[event_log.Entry], changes: Mapping[str, Any], objectives: LatencyLimits, request_id: str = "",
    retain: Mapping[str, float] = NO_RETENTION, pacer: Pacer | None = None,
) -> dict[str, Any]:
    """Returns the figures of a log's traffic: measured, replayed, and replayed under changed settings; JSON-ready.

    Args:
        changes: of the settings that held last, as `Scheduling.changed` names them.
        request_id: of a request to tell apart, with the times of its own; "": none.
        retain: seconds for which the prompts of a session are retained, by its name; "*": of all sessions.
        pacer: of the work; None: it is done on end.

    Raises:
        ValueError: the log or the changes are invalid; the message is one line.
    """
    if "tiers" in changes:
        raise ValueError("a what-if changes no tiers: leave them out")
    setup, recording = read_recording(entries)
    if recording.receives:
        raise ValueError("prompts of this log were computed by other engines, or read from disk: a replay does not "
                         "know when they arrive")
    if isinstance(setup.pace, LearnedPace):
        setup = replace(setup, pace=replace(setup.pace, replays=True))
    if not recording.num_refused:  # the log does not name the queue's bounds, but the server accepted every request
        setup = replace(setup, max_queued=(ANY_NUMBER, ANY_NUMBER))
    changed = setup.under(recording.scheduling or setup.scheduling).changed(changes)
    if retain and changed.limits.eviction_policy not in OBEYING:
        raise ValueError(f"retain: the eviction policy {changed.limits.eviction_policy} obeys no retention; change "
                         f"eviction_policy to {' or '.join(OBEYING)}, too")
    traffic = recording.traffic
    over = pacer.over if pacer is not None else lambda commands, _: commands
    other = _retained(_without_changes(traffic), retain)
    runs: Runs = {
        MEASURED: recording.measured,
        REPLAYED: simulate(over(traffic, REPLAY), [Server(setup, recording.outputs)]),
        WHAT_IF: simulate(over(other, REPLAY), [Server(changed, recording.outputs)])}
    whole = {number for number in recording.measured if number not in recording.partial}
    if not whole:
        raise ValueError("no request of the log has begun and ended in it")
    runs = {run: {number: one for number, one in found.items() if number in whole} for run, found in runs.items()}
    arrivals = [one.arrived for one in runs[MEASURED].values()]
    groups = _groups(recording, runs, objectives)
    answer: dict[str, Any] = {
        "verdicts": {name: verdict(found) for name, found in groups.items()},
        "changes": dict(changes), "settings": changed.scheduling.as_settings(), "requests": len(whole),
        "seconds": max(arrivals) - min(arrivals), "refused_unknown": recording.num_refused,
        "groups": groups, "prompts": prompts_of(runs, recording.num_prompt, setup.pace)}
    answer["prompts_text"] = prompts_in_words(answer["prompts"], groups[ALL])
    return answer | ({"request": _of_request(runs, recording.names, request_id)} if request_id else {})


def _without_changes(traffic: Iterable[tuple[float, Command]]) -> list[tuple[float, Command]]:
    """The traffic without what an operator changed meanwhile: the settings in question hold from the start."""
    return [(at, command) for at, command in traffic if not isinstance(command, Configure)]


def _retained(
    traffic: Iterable[tuple[float, Command]], retain: Mapping[str, float],
) -> list[tuple[float, Command]]:
    """The traffic with other retentions."""
    found = []
    for at, command in traffic:
        if isinstance(command, Add) and (seconds := retain.get(command.spec.session, retain.get(EVERY, 0.0))):
            spec = replace(command.spec, retain=seconds, retain_tokens=0)
            command = Add(command.request_id, spec, command.timing, command.name)
        found.append((at, command))
    return found


def prompts_of(runs: Runs, num_prompt: Mapping[int, int], pace: Pace) -> dict[str, dict[str, float]]:
    """Returns for each run the tokens of prompts, those found in the cache and those computed, and the seconds for it.

    A prompt's seconds are those of a step that computes it alone, at once.
    """
    found = {}
    for run, requests in runs.items():
        works = []
        for number, one in requests.items():
            computed = one.num_prefilled
            start = max(0, num_prompt[number] - computed)
            works.append(Work(computed, 1, 0, computed * (start + (computed + 1) / 2)))
        found[run] = {
            "tokens": sum([num_prompt[number] for number in requests]),
            "found": sum([one.num_cached for one in requests.values()]),
            "computed": sum([one.num_prefilled for one in requests.values()]),
            "seconds": sum([pace.predicted(work) for work in works if work.tokens])}
    return found


def prompts_in_words(prompts: Mapping[str, Mapping[str, float]], runs: Mapping[str, Mapping[str, float]]) -> str:
    """Returns what the changes would have saved of prompts, compared with the replay."""
    before, after = prompts[REPLAYED], prompts[WHAT_IF]
    seconds = before["seconds"] - after["seconds"]
    change = error_of(runs[REPLAYED]["ttft_p50"], runs[WHAT_IF]["ttft_p50"])
    waits = f"; half of the first tokens came {change:+.0%} later" if abs(change) < inf else ""
    return (f"{abs(seconds):.3g} s of prompt computation {'saved' if seconds >= 0 else 'more'}: {after['found']:,} of "
            f"{after['tokens']:,} prompt tokens found in the cache, where {before['found']:,} were{waits}.")


def _groups(recording: Recording, runs: Runs, objectives: LatencyLimits) -> dict[str, dict[str, dict[str, float]]]:
    """Returns the figures of all requests, then by tenant and by tier where there are several."""
    def of(found: Mapping[str, Sequence[SimulatedRequest]]) -> dict[str, dict[str, float]]:
        return {run: figures(requests, objectives).as_json() for run, requests in found.items()}

    groups = {ALL: of({run: list(requests.values()) for run, requests in runs.items()})}
    for what, group_of in (("tenant", recording.tenants), ("tier", recording.tiers)):
        names = sorted({group_of[number] for number in runs[MEASURED]})
        by_run = {run: grouped(requests, group_of) for run, requests in runs.items()}
        for name in names if len(names) > 1 else ():
            groups[f"{what} {name or 'without a name'}"] = of({run: found[name] for run, found in by_run.items()})
    return groups


def _of_request(runs: Runs, names: Mapping[int, str], request_id: str) -> dict[str, Any]:
    """Returns when a request had its first and its last token in each run, in seconds from its arrival."""
    found = [number for number in runs[MEASURED] if request_id in (names[number], names[number].rpartition("-")[0])]
    if not found:
        raise ValueError(f"no request {request_id!r:.80} has begun and ended in the log")
    return {"id": names[found[0]], **{run: {
        "first_token": one.ttft, "end": one.ended - one.arrived, "reason": one.reason} for run, one in (
            (run, requests[found[0]]) for run, requests in runs.items())}}


# -- what it is worth --------------------------------------------------------------------------------------------------


def error_of(measured: float, replayed: float) -> float:
    """Returns by what share of the measurement a replay misses it; infinite where nothing was measured."""
    return replayed / measured - 1 if measured else inf if replayed else 0.0


def is_reliable(error: float) -> bool:
    return abs(error) <= RELIABLE


def verdict(runs: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """Returns what the figures of a what-if are worth: the largest error of the replay, in figures and in words.

    Args:
        runs: the figures of each run, by name.
    """
    errors = {name: error_of(runs[MEASURED][name], runs[REPLAYED][name]) for name in WORDS}
    worst = max(errors, key=lambda name: abs(errors[name]))
    unreliable = [name for name, error in errors.items() if not is_reliable(error)]
    return {"is_reliable": not unreliable, "text": in_words(errors[worst], WORDS[worst]), "unreliable": unreliable,
            "errors": {name: error if abs(error) < inf else None for name, error in errors.items()}}


def in_words(error: float, what: str) -> str:
    """Returns the verdict on a what-if whose replay misses one of its figures by `error`, and the others by less."""
    if is_reliable(error):
        return f"The replay of what was is within {abs(error):.0%} of the measurement: smaller changes say nothing."
    by = f"by {abs(error):.0%}" if abs(error) < inf else "altogether"
    return (f"NOT RELIABLE: the replay of what was misses the measurement {by} ({what}). What it says of other "
            "settings is as far off.")


# -- a server's question -----------------------------------------------------------------------------------------------


def _from_lines(lines: bytes, changes: dict[str, Any], ttft: float | None, tpot: float | None, request_id: str,
                retain: dict[str, float], wanted: float, until: float) -> tuple[dict[str, Any] | None, str, float]:
    """Returns the answer, why there is none, and the seconds that the work took without its rests.

    Without an answer and without a reason the time was over; the seconds estimate what the work would have taken.

    Args:
        wanted: when the answer is wanted, in seconds of the system's monotonic clock.
        until: when the work ends without an answer.
    """
    now = time.monotonic()
    try:
        with Pacer(wanted - now, until - now) as pacer:
            entries = log_file.read(pacer.over(lines.splitlines(keepends=True), READING))
            found = what_if(entries, changes, LatencyLimits(ttft, tpot), request_id, retain, pacer)
            return found, "", pacer.worked
    except OutOfTime as error:
        return None, "", error.seconds
    except ValueError as error:
        return None, str(error), pacer.worked


CALLS = {"what_if": _from_lines}


Item = TypeVar("Item")


class OutOfTime(Exception):
    """The work was not done in time; `seconds` estimates what all of it would have taken."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"it takes about {seconds:.0f} s")
        self.seconds = seconds


class Pacer:
    """A context, of the main thread, in which work is paced.

    An alarm that is set when it begins ends the process at its time all the same.

    Args:
        seconds: from its beginning until the work is to be done.
        most: from its beginning until OutOfTime ends what is not.
    """

    def __init__(self, seconds: float, most: float = inf) -> None:
        self._seconds, self._most = seconds, most
        self._done = 0.0  # of all work
        self._waited = 0.0  # seconds of moments in which other programs had the processor
        self._is_over = False

    @property
    def worked(self) -> float:
        """Seconds of the work without its rests; in some of them other programs had the processor."""
        return time.process_time() - self._worked + self._waited

    def over(self, items: Sequence[Item], share: float) -> Iterator[Item]:
        """Yields `items`: what is done with them is this share of all work."""
        before = self._done
        for number, item in enumerate(items):
            self._done = before + share * number / len(items)
            yield item
        self._done = before + share

    def __enter__(self) -> Self:
        self._began, self._worked = time.monotonic(), time.process_time()
        self._resumed, self._resumed_at = self._worked, self._began
        self._handler = signal.signal(signal.SIGALRM, self._rest)
        self._alarm, _ = signal.setitimer(signal.ITIMER_REAL, LEAST * PERIOD)
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True  # a moment that ends from here on sets no alarm
        left = self._alarm - (time.monotonic() - self._began)
        signal.setitimer(signal.ITIMER_REAL, max(left, PERIOD) if self._alarm else 0.0)
        signal.signal(signal.SIGALRM, self._handler)

    def _rest(self, _number: int, _frame: FrameType | None) -> None:
        if self._is_over:
            return
        now = time.monotonic()
        if self._alarm and now - self._began > self._alarm:
            signal.signal(signal.SIGALRM, self._handler)
            signal.raise_signal(signal.SIGALRM)
        worked = time.process_time()
        self._waited += max(0.0, now - self._resumed_at - (worked - self._resumed))
        if now - self._began > self._most:
            self._is_over = True
            raise OutOfTime((now - self._began) / max(self._done, ESTIMATED))
        share = self._share(self._seconds - (now - self._began), self.worked)
        time.sleep((worked - self._resumed) * (1 / share - 1))
        self._resumed, self._resumed_at = time.process_time(), time.monotonic()
        signal.setitimer(signal.ITIMER_REAL, share * PERIOD)

    def _share(self, left: float, worked: float) -> float:
        """Returns the part of the time to work.

        Args:
            left: seconds until the work is to be done.
            worked: seconds that the work has taken so far, as `worked`.
        """
        if self._done < ESTIMATED:
            return LEAST
        to_come = worked * (1 - self._done) / self._done
        return min(1.0, max(LEAST, to_come / left)) if left > 0 else 1.0
