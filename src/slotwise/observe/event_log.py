"""The event log: what a run was asked, what it planned and what it told, as one stream of entries.

    Run                               an engine is ready: what it obeys from here on
    Request, Command                  sent to the engine, in this order
    Step                              one for every record of the engine: plan, tokens, ends, where it stands
    Sent                              a response is complete
    Refusal, Engine, Gap              who was not let in; an engine lost; entries missing

A file has one entry a line, as JSON; `GET /events` streams the same lines.  Requests have *numbers*, 0, 1, 2 ... in the
order of their arrival in a log, so that a step's columns are small integers.  Times are monotonic nanoseconds of one
clock, those called `seconds` apart; `Run.started_unix` ties them to the calendar.  Whoever draws, explains, counts or
replays folds over these entries, live or from a file.

A file tells everything, and can be replayed.  A stream leaves prompts and salts out; it begins with the last `Run` and
the `Request`s that are still of interest, and after a `Gap` it begins like that again: forget who was alive.  In a file
what a `Gap` stands for is lost.
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
    """What is at its default is not written."""


class Run(_Entry, tag="run"):
    """An engine is ready to take requests, the first or one that follows a lost one.  Nobody lives in it yet."""

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
    learned: Learned | None = None  # what the engine knew of step times


class Request(_Entry, tag="request", rename={"slo": "terms"}):
    """A generation was asked for.  The engine takes it in later: see `Step.taken`."""

    number: int
    id: str  # the engine's; begins with that of the response
    ns: int  # given to the engine
    num_prompt: int
    params: SamplingParams
    seed: int
    received_ns: int = 0  # the first of it was read; 0: it did not come over HTTP
    tokenised_ns: int = 0  # its prompt was known
    output_tokens: int = 0  # a benchmark drew its length; 0: none did
    queue_timeout: float = 0.0  # seconds; 0: none
    slo: SLO = NO_SLO  # what it was promised; whose it is, in a file only
    salt: str = ""  # what it shares cached beginnings under, in a stream empty
    prompt: tuple[int, ...] = ()  # in a file only


class Command(_Entry, tag="command"):
    """The engine was told to end `number` for `reason`, or to obey `scheduling` from its next plan on."""

    ns: int
    number: int = -1
    reason: str = ""
    scheduling: Scheduling | None = None


class Admission(NamedTuple):
    """It took a slot in this step."""

    number: int
    cached: int  # tokens whose keys and values were found


class Preemption(NamedTuple):
    """It gave its slot up for this step."""

    number: int
    reason: str
    lost: int  # tokens that had been computed


class Refused(NamedTuple):
    """It was examined, and is not in this step."""

    number: int
    reason: str


class Stop(NamedTuple):
    """Where admission ended: everyone from `first_blocked` on waits for `reason`."""

    reason: str
    first_blocked: int
    num_behind: int
    reopens_at: float | None = None  # seconds, on the clock of all the times; None: not by the clock alone


class End(NamedTuple):
    number: int
    reason: str
    num_output: int
    message: str = ""


class Step(_Entry, tag="step", rename={"released_slots": "leaves", "new_blocks": "grants"}):
    """One record of the engine.  Rows are columns: row i is request `numbers[i]` in slot `slots[i]`, of which
    `counts[i]` tokens from `starts[i]` on are computed.  `step` -1 has no rows: something happened between steps.
    """

    step: int
    started_ns: int  # it was planned
    ended_ns: int  # its tokens were there
    planned: tuple[int, ...] = ()  # ns at which each plan was begun that was made for this record: its own, or the next
    taken: tuple[int, ...] = ()  # ns at which each command was taken in since the record before, in the order sent
    numbers: tuple[int, ...] = ()
    slots: tuple[int, ...] = ()
    starts: tuple[int, ...] = ()
    counts: tuple[int, ...] = ()
    padding: tuple[int, ...] = ()  # tokens of nothing beside each row; () when there are none
    held: tuple[int, ...] = ()  # rows that have their last token and are computed for nothing
    tokens: tuple[tuple[int, ...], ...] = ()  # told: () for a row that yielded none, or whose batch has not drained
    sampled: tuple[tuple[int, ...], ...] = ()  # of each row, where that is not what was told
    failed: tuple[int, ...] = ()  # rows that could not sample
    admitted: tuple[Admission, ...] = ()
    preempted: tuple[Preemption, ...] = ()
    refused: tuple[Refused, ...] = ()
    stop: Stop | None = None
    ended: tuple[End, ...] = ()
    released_slots: tuple[int, ...] = ()  # slots given back since the plan before
    new_blocks: tuple[NewBlocks, ...] = ()  # blocks appended to a slot's block table
    saves: tuple[Copy, ...] = ()  # from blocks of the device to places of the host, before anything was written
    loads: tuple[Copy, ...] = ()  # and back, before anything was read
    configured: Scheduling | None = None  # obeyed from the next plan on
    failure: str = ""  # the forward pass broke: why
    num_running: int = 0
    num_waiting: int = 0
    num_free_blocks: int = 0


class Sent(_Entry, tag="sent"):
    """The response to `number` was given to the socket: its first byte, its last, in so many pieces."""

    number: int
    first_ns: int
    last_ns: int
    num_events: int


class Refusal(_Entry, tag="refusal"):
    """Somebody was turned away before the engine heard of it."""

    ns: int
    reason: str


class Engine(_Entry, tag="engine"):
    """The engine is gone.  A `Step` that ends whoever lived in it follows; the next engine begins with a `Run`."""

    ns: int
    state: str
    message: str = ""


class Gap(_Entry, tag="gap"):
    """So many entries are missing here: whoever writes or reads could not keep up."""

    missed: int


Entry = Run | Request | Command | Step | Sent | Refusal | Engine | Gap


class LogError(ValueError):
    """What is there is no event log; the message is one line for a person."""


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Entry)
encode = _encoder.encode
encode_lines = _encoder.encode_lines


def line_of(entry: Entry) -> bytes:
    """An entry as it is written, the end of its line included."""
    return encode_lines((entry,))


def decode(line: bytes | str) -> Entry:
    """Raises LogError."""
    try:
        return _decoder.decode(line)
    except msgspec.MsgspecError as error:
        raise LogError(f"this is not an entry of an event log ({error})") from error


def read(lines: Iterable[bytes]) -> Iterator[Entry]:
    """The entries in `lines`.  A last line without an end was being written: it is left out.

    Raises:
        LogError: a line is no entry; says which one.
    """
    for number, line in enumerate(lines, 1):
        if not line.endswith(b"\n"):
            return
        try:
            yield decode(line)
        except LogError as error:
            raise LogError(f"line {number}: {error}") from error


def read_file(path: Path | str) -> Iterator[Entry]:
    """The entries of a file, read as they are asked for.

    Raises:
        LogError: it cannot be read, or is no event log.
    """
    try:
        with Path(path).open("rb") as file:
            yield from read(file)
    except OSError as error:
        raise LogError(f"{path}: {error.strerror}") from error
