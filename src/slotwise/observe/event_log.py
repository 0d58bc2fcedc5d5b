"""The event log: requests, plans and results of a run, as one stream of entries.

    Run                               an engine is ready, with its settings
    RequestEntry, Command                 sent to the engine, in this order
    Step                              one for every record of the engine: plan, tokens, ends, counters
    Sent                              a response is complete
    Refusal, Engine, Gap              a request refused; an engine lost; entries missing

A file has one JSON entry per line; `GET /events` streams the same lines.  Requests have *numbers*, 0, 1, 2 ... in order
of arrival in a log, so that a step's columns are small integers.  Times are monotonic nanoseconds of one clock, except
those called `seconds`; `Run.started_unix` relates them to the calendar.  The timeline page, explanations, metrics of a
log and the replay are folds over these entries, live or from a file.

`log_format.py` has the version of all this.  A log begins with a `Run`, which names it, and every reader refuses
another one.

A file is complete, and can be replayed.  A stream omits prompts and salts; it begins with the last `Run` and the
`RequestEntry` of each unfinished request, and after a `Gap` it begins like that again: readers drop the requests they
had.  In a file the entries that a `Gap` counts are lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from slotwise.core.limits import SchedulerLimits
from slotwise.core.request import RequestSpec
from slotwise.core.step import Copy, FreedBlocks, Proposing, RankSpan, RowKind
from slotwise.core.step_time import Learned
from slotwise.engine.messages import Add, Timing
from slotwise.engine.scheduling import Scheduling
from slotwise.observe.log_checks import MAX_TOKENS, wrong_request, wrong_run, wrong_step
from slotwise.observe.log_format import FORMAT, LogError, check_format
from slotwise.speculation.speculation_settings import Speculation
from slotwise.version import __version__

MAX_LINE = 1 << 26  # bytes
LOST = "lost"  # the state of an engine
Number = Annotated[int, msgspec.Meta(ge=0, le=2**53)]  # of a request, or a count
Ns = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Tokens = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]


class _Entry(msgspec.Struct, tag_field="kind", omit_defaults=True, gc=False):
    """Fields at their defaults are not written."""


class Run(_Entry, tag="run"):
    """An engine is ready, the first or the replacement of a lost one.  It holds no requests yet."""

    format: int  # of the log: another one than this program's is refused
    version: str
    model: str
    dtype: str
    device: str
    started_unix: float  # seconds
    started_ns: Ns
    limits: SchedulerLimits
    scheduling: Scheduling
    eos_token_ids: tuple[int, ...] = ()
    depth: int = 0  # steps that may be in flight while the next is planned
    learned: Learned | None = None  # state of the engine's step-time model
    speculation: Speculation | None = None  # where drafts come from; None: there are none


class RequestEntry(_Entry, tag="request"):
    """A generation was requested.  The engine handles it later: see `Step.taken`."""

    ns: Ns  # sent to the engine
    num_prompt: Number
    add: Add  # as it was sent, in a file; a stream has `RequestSpec.public`

    @property
    def number(self) -> int:
        return self.add.request_id

    @property
    def id(self) -> str:
        """Its name, which begins with the response's id."""
        return self.add.name

    @property
    def spec(self) -> RequestSpec:
        return self.add.spec

    @property
    def timing(self) -> Timing:
        return self.add.timing

    def replace_spec(self, spec: RequestSpec) -> RequestEntry:
        return RequestEntry(self.ns, self.num_prompt, Add(self.number, spec, self.timing, self.id))


class Command(_Entry, tag="command"):
    """The engine received a command to end `number` for `reason`, or to apply `scheduling` from its next plan on."""

    ns: Ns
    number: int = -1
    reason: str = ""
    scheduling: Scheduling | None = None


class Admission(NamedTuple):
    """A request admitted to a slot in this step."""

    number: Number
    cached: Number  # tokens found in the cache


class Preemption(NamedTuple):
    """A request that lost its slot in this step."""

    number: Number
    reason: str
    lost: Number  # tokens computed before


class Refused(NamedTuple):
    """A request examined and not in this step."""

    number: Number
    reason: str


class Compiled(NamedTuple):
    """The grammar of a request is compiled, before this step's plan was made; an objection says why it cannot be."""

    number: Number
    objection: str = ""  # empty: none


class Arrival(NamedTuple):
    """Blocks of a request's prompt came from another engine, before this step's plan was made."""

    number: Number
    num_blocks: Number  # of the prompt, from its first one on, that were there
    is_last: bool  # no more will arrive
    failure: str = ""  # why others will not


class Stop(NamedTuple):
    """Where admission ended: all requests of the queue from `first_blocked` on wait for `reason`."""

    reason: str
    first_blocked: Number
    num_behind: Number
    reopens_at: float | None = None  # seconds, on the log's clock; None: not by the clock alone


class End(NamedTuple):
    number: Number
    reason: str
    num_output: Number
    message: str = ""


class NewBlocks(NamedTuple):
    """Blocks appended to a slot's block table."""

    slot: int
    blocks: tuple[int, ...]
    group: int


class Step(_Entry, tag="step", rename={"released_slots": "leaves", "new_blocks": "grants"}):
    """One record of the engine.  Rows are columns: row i is request `numbers[i]` in slot `slots[i]`, of which
    `counts[i]` tokens from `starts[i]` on are computed.  `step` -1 has no rows: for events between steps.
    """

    step: int
    started_ns: Ns  # its plan was started
    ended_ns: Ns  # its tokens were available
    planned: tuple[Ns, ...] = ()  # ns at which each plan made since the last record was started: its own, or the next
    taken: tuple[Ns, ...] = ()  # ns at which each command since the last record was handled, in the order sent
    numbers: tuple[Number, ...] = ()
    slots: tuple[Number, ...] = ()
    starts: tuple[Number, ...] = ()
    counts: tuple[Annotated[int, msgspec.Meta(le=MAX_TOKENS)], ...] = ()
    padding: tuple[Tokens, ...] = ()  # padding tokens beside each row; () when there are none
    held: tuple[Number, ...] = ()  # rows that have their last token and are computed without use
    tokens: tuple[tuple[int, ...], ...] = ()  # published; () for a row without any, or whose batch has not drained
    sampled: tuple[tuple[int, ...], ...] = ()  # of each row, where they differ from `tokens`
    failed: tuple[Number, ...] = ()  # rows that could not sample
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
    num_running: Number = 0
    num_waiting: Number = 0
    num_free_blocks: Number = 0
    prefills: tuple[Number, ...] = ()  # rows that compute tokens known when their request joined
    drafts: tuple[tuple[int, ...], ...] = ()  # tokens that each row verifies; () when there are none
    forced: tuple[tuple[int, ...], ...] = ()  # of each row, what its grammar forces behind its tokens; () if nothing
    compiled: tuple[Compiled, ...] = ()  # grammars that requests waited for
    arrivals: tuple[Arrival, ...] = ()  # blocks that requests waited for
    acknowledged: tuple[str, ...] = ()  # transfers whose blocks other engines have read
    freed_blocks: tuple[FreedBlocks, ...] = ()  # blocks that left the end of a slot's block table, before the new ones
    draft_limit: str = ""  # why there are no more drafts (`core/drafting.py`); "" where none can be
    proposing: Proposing | None = None  # what a draft model took, of the step's time
    expired_blocks: tuple[FreedBlocks, ...] = ()  # blocks behind a window, which left a slot's block table likewise
    ranks: tuple[RankSpan, ...] = ()  # when each rank worked on it; () where one process computes the model

    @property
    def kinds(self) -> tuple[RowKind, ...]:
        return tuple([self.kind_of(row) for row in range(len(self.counts))])

    def end_of(self, row: int) -> int:
        """The position behind the tokens that a row computed, without drafts that were not accepted."""
        accepted = len((self.sampled or self.tokens)[row]) if self.drafts and self.drafts[row] else self.counts[row]
        return self.starts[row] + accepted

    @property
    def verified(self) -> list[tuple[int, int]]:
        """For each row with drafts, their number, and how many of them were right."""
        yielded = self.sampled or self.tokens
        return [(len(drafts), max(0, len(tokens) - 1))
                for drafts, tokens in zip(self.drafts, yielded, strict=False) if drafts]

    def kind_of(self, row: int) -> RowKind:
        return RowKind.PREFILL if row in self.prefills else RowKind.DECODE


class Sent(_Entry, tag="sent"):
    """The response to `number` was written to the socket: times of its first and last byte, number of events."""

    number: Number
    first_ns: Ns
    last_ns: Ns
    num_events: Number


class Refusal(_Entry, tag="refusal"):
    """A request was refused before it reached the engine."""

    ns: Ns
    reason: str


class Engine(_Entry, tag="engine"):
    """The engine is lost.  A `Step` that ends all its requests follows; the next engine begins with a `Run`."""

    ns: Ns
    state: str
    message: str = ""


class Gap(_Entry, tag="gap"):
    """`missed` entries are missing here: the writer or the reader could not keep up."""

    missed: Number


Entry = Run | RequestEntry | Command | Step | Sent | Refusal | Engine | Gap


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Entry)
encode, encode_lines = _encoder.encode, _encoder.encode_lines


def line_of(entry: Entry) -> bytes:
    """Returns the line of an entry, with its line end, in memory of its own size.

    The encoder's buffer of a kilobyte is shrunk where it lies, so a short line that is kept as it was encoded leaves a
    hole behind it that no later buffer fits into.
    """
    return bytes(memoryview(encode_lines([entry])))  # msgspec 0.22 frees the iterator of no sequence but a list


def decode(line: bytes | str) -> Entry:
    """Returns the entry of a line.

    Raises:
        FormatError: it begins a log of another format.
        LogError: it is none.
    """
    try:
        entry: Entry = _decoder.decode(line)
    except msgspec.MsgspecError as error:
        check_format(line)
        raise LogError(f"this is not an entry of an event log ({error})") from error
    wrong = ""
    if isinstance(entry, Step):
        wrong = wrong_step(entry)
    elif isinstance(entry, RequestEntry):
        wrong = wrong_request(entry)
    elif isinstance(entry, Run):
        check_format(line)
        wrong = wrong_run(entry)
    if wrong:
        raise LogError(f"this is not an entry of an event log ({wrong})")
    return entry


def read(lines: Iterable[bytes]) -> Iterator[Entry]:
    """Yields the entries in `lines`, without an incomplete last line.

    Raises:
        FormatError: they have another format.
        LogError: a line is no entry; the message has its number.
    """
    for number, line in enumerate(lines, 1):
        if len(line) > MAX_LINE:
            raise LogError(f"line {number}: more than {MAX_LINE} bytes")
        if not line.endswith(b"\n"):
            return
        try:
            yield decode(line)
        except LogError as error:
            raise type(error)(f"line {number}: {error}") from error


def read_file(path: Path | str) -> Iterator[Entry]:
    """Yields the entries of a file, read lazily.

    Raises:
        FormatError: it has another format.
        LogError: the file cannot be read, or is no event log, or has lost its beginning.
    """
    try:
        with Path(path).open("rb") as file:
            for index, entry in enumerate(read(iter(lambda: file.readline(MAX_LINE + 1), b""))):
                if index == 0 and not isinstance(entry, Run):
                    raise LogError(f"line 1: the beginning of this event log is missing, and its format with it; "
                                   f"slotwise {__version__} reads format {FORMAT}")
                yield entry
    except OSError as error:
        raise LogError(f"{path}: {error.strerror}") from error
