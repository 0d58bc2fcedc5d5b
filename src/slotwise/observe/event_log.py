"""The event log: requests, plans and results of a run, as one stream of entries.

    Run                               an engine is ready, with its settings
    Request, Command                  sent to the engine, in this order
    Step                              one for every record of the engine: plan, tokens, ends, counters
    Sent                              a response is complete
    Refusal, Engine, Gap              a request refused; an engine lost; entries missing

A file has one JSON entry per line; `GET /events` streams the same lines.  Requests have *numbers*, 0, 1, 2 ... in order
of arrival in a log, so that a step's columns are small integers.  Times are monotonic nanoseconds of one clock, except
those called `seconds`; `Run.started_unix` relates them to the calendar.  The timeline page, explanations, metrics of a
log and the replay are folds over these entries, live or from a file.

A file is complete, and can be replayed.  A stream omits prompts and salts; it begins with the last `Run` and the
`Request`s still unfinished, and after a `Gap` it begins like that again: readers drop the requests they had.  In a file
the entries that a `Gap` counts are lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from slotwise.core.limits import SchedulerLimits
from slotwise.core.params import SamplingParams
from slotwise.core.request import NO_SLO
from slotwise.core.slo import SLO
from slotwise.core.step import Copy, NewBlocks
from slotwise.core.step_time import Learned
from slotwise.engine.scheduling import Scheduling

NO_STEP = -1
LOST = "lost"  # the state of an engine


class _Entry(msgspec.Struct, tag_field="kind", omit_defaults=True, gc=False):
    """Fields at their defaults are not written."""


class Run(_Entry, tag="run"):
    """An engine is ready, the first or the replacement of a lost one.  It holds no requests yet."""

    version: str
    model: str
    dtype: str
    device: str
    started_unix: float  # seconds
    started_ns: int
    limits: SchedulerLimits
    scheduling: Scheduling
    eos_token_ids: tuple[int, ...] = ()
    depth: int = 0  # steps that may be in flight while the next is planned
    learned: Learned | None = None  # state of the engine's step-time model


class Request(_Entry, tag="request", rename={"slo": "terms"}):
    """A generation was requested.  The engine handles it later: see `Step.taken`."""

    number: int
    id: str  # the engine's; begins with the response's
    ns: int  # sent to the engine
    num_prompt: int
    params: SamplingParams
    seed: int
    received_ns: int = 0  # its first bytes were read; 0: not over HTTP
    tokenised_ns: int = 0  # its prompt was tokenised
    output_tokens: int = 0  # output length forced by a benchmark; 0: none
    queue_timeout: float = 0.0  # seconds; 0: none
    slo: SLO = NO_SLO  # its tier and objectives; its tenant, in a file only
    salt: str = ""  # of its cached prefixes; empty in a stream
    prompt: tuple[int, ...] = ()  # in a file only


class Command(_Entry, tag="command"):
    """The engine received a command to end `number` for `reason`, or to apply `scheduling` from its next plan on."""

    ns: int
    number: int = -1
    reason: str = ""
    scheduling: Scheduling | None = None


class Admission(NamedTuple):
    """A request admitted to a slot in this step."""

    number: int
    cached: int  # tokens found in the cache


class Preemption(NamedTuple):
    """A request that lost its slot in this step."""

    number: int
    reason: str
    lost: int  # tokens computed before


class Refused(NamedTuple):
    """A request examined and not in this step."""

    number: int
    reason: str


class Stop(NamedTuple):
    """Where admission ended: all requests of the queue from `first_blocked` on wait for `reason`."""

    reason: str
    first_blocked: int
    num_behind: int
    reopens_at: float | None = None  # seconds, on the log's clock; None: not by the clock alone


class End(NamedTuple):
    number: int
    reason: str
    num_output: int
    message: str = ""


class Step(_Entry, tag="step", rename={"released_slots": "leaves", "new_blocks": "grants"}):
    """One record of the engine.  Rows are columns: row i is request `numbers[i]` in slot `slots[i]`, of which
    `counts[i]` tokens from `starts[i]` on are computed.  `step` -1 has no rows: for events between steps.
    """

    step: int
    started_ns: int  # its plan was started
    ended_ns: int  # its tokens were available
    planned: tuple[int, ...] = ()  # ns at which each plan made since the last record was started: its own, or the next
    taken: tuple[int, ...] = ()  # ns at which each command since the last record was handled, in the order sent
    numbers: tuple[int, ...] = ()
    slots: tuple[int, ...] = ()
    starts: tuple[int, ...] = ()
    counts: tuple[int, ...] = ()
    padding: tuple[int, ...] = ()  # padding tokens beside each row; () when there are none
    held: tuple[int, ...] = ()  # rows that have their last token and are computed without use
    tokens: tuple[tuple[int, ...], ...] = ()  # published; () for a row without any, or whose batch has not drained
    sampled: tuple[tuple[int, ...], ...] = ()  # of each row, where they differ from `tokens`
    failed: tuple[int, ...] = ()  # rows that could not sample
    admitted: tuple[Admission, ...] = ()
    preempted: tuple[Preemption, ...] = ()
    refused: tuple[Refused, ...] = ()
    stop: Stop | None = None
    ended: tuple[End, ...] = ()
    released_slots: tuple[int, ...] = ()  # slots released since the last plan
    new_blocks: tuple[NewBlocks, ...] = ()  # blocks appended to a slot's block table
    saves: tuple[Copy, ...] = ()  # copies from device blocks to host blocks, before any write of the step
    loads: tuple[Copy, ...] = ()  # copies from host blocks to device blocks, before any read of the step
    configured: Scheduling | None = None  # settings in force from the next plan on
    failure: str = ""  # why the forward pass failed
    num_running: int = 0
    num_waiting: int = 0
    num_free_blocks: int = 0


class Sent(_Entry, tag="sent"):
    """The response to `number` was written to the socket: times of its first and last byte, number of events."""

    number: int
    first_ns: int
    last_ns: int
    num_events: int


class Refusal(_Entry, tag="refusal"):
    """A request was refused before it reached the engine."""

    ns: int
    reason: str


class Engine(_Entry, tag="engine"):
    """The engine is lost.  A `Step` that ends all its requests follows; the next engine begins with a `Run`."""

    ns: int
    state: str
    message: str = ""


class Gap(_Entry, tag="gap"):
    """`missed` entries are missing here: the writer or the reader could not keep up."""

    missed: int


Entry = Run | Request | Command | Step | Sent | Refusal | Engine | Gap


class LogError(ValueError):
    """Invalid content of an event log; the message is one line for a person."""


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Entry)
encode = _encoder.encode
encode_lines = _encoder.encode_lines


def line_of(entry: Entry) -> bytes:
    """Returns the line of an entry, with its line end."""
    return encode_lines((entry,))


def decode(line: bytes | str) -> Entry:
    """Returns the entry of a line; raises LogError if it is none."""
    try:
        entry = _decoder.decode(line)
    except msgspec.MsgspecError as error:
        raise LogError(f"this is not an entry of an event log ({error})") from error
    if isinstance(entry, Step) and min(entry.counts, default=1) < 1:
        raise LogError("this is not an entry of an event log (a row has no tokens)")
    scheduling = entry.scheduling if isinstance(entry, Run) else entry.configured if isinstance(entry, Step) else None
    if scheduling is not None and scheduling.max_num_batched_tokens < 1:
        raise LogError("this is not an entry of an event log (its steps have no tokens)")
    return entry


def read(lines: Iterable[bytes]) -> Iterator[Entry]:
    """Yields the entries in `lines`, without an incomplete last line.

    Raises:
        LogError: a line is no entry; the message has its number.
    """
    for number, line in enumerate(lines, 1):
        if not line.endswith(b"\n"):
            return
        try:
            yield decode(line)
        except LogError as error:
            raise LogError(f"line {number}: {error}") from error


def read_file(path: Path | str) -> Iterator[Entry]:
    """Yields the entries of a file, read lazily.

    Raises:
        LogError: the file cannot be read, or is no event log.
    """
    try:
        with Path(path).open("rb") as file:
            yield from read(file)
    except OSError as error:
        raise LogError(f"{path}: {error.strerror}") from error
