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

import math
from collections.abc import Iterable, Iterator, Sized
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from slotwise.core.limits import SchedulerLimits
from slotwise.core.params import SamplingParams
from slotwise.core.request import NO_SLO
from slotwise.core.slo import SLO
from slotwise.core.step import CACHE_GROUP, Copy, FreedBlocks, RowKind
from slotwise.core.step_time import Learned, StepTimeModel
from slotwise.engine.scheduling import Scheduling

NO_STEP = -1
MAX_BLOCKS = 1 << 24  # of a cache; a replay keeps a few dozen bytes for each
MAX_SEQS = 1 << 20
MAX_TOKENS = 1 << 31  # of a row, and of any limit
MAX_DEPTH = 64
MAX_LINE = 1 << 26  # bytes
MAX_SUM = 1e60  # of what a step-time model has learned
LOST = "lost"  # the state of an engine


Number = Annotated[int, msgspec.Meta(ge=0, le=2**53)]  # of a request, or a count
Ns = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Tokens = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]


class _Entry(msgspec.Struct, tag_field="kind", omit_defaults=True, gc=False):
    """Fields at their defaults are not written."""


class Run(_Entry, tag="run"):
    """An engine is ready, the first or the replacement of a lost one.  It holds no requests yet."""

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


class Request(_Entry, tag="request", rename={"slo": "terms"}):
    """A generation was requested.  The engine handles it later: see `Step.taken`."""

    number: Number
    id: str  # the engine's; begins with the response's
    ns: Ns  # sent to the engine
    num_prompt: Number
    params: SamplingParams
    seed: int
    received_ns: Ns = 0  # its first bytes were read; 0: not over HTTP
    tokenised_ns: Ns = 0  # its prompt was tokenised
    output_tokens: Number = 0  # output length forced by a benchmark; 0: none
    queue_timeout: float = 0.0  # seconds; 0: none
    slo: SLO = NO_SLO  # its tier and objectives; its tenant, in a file only
    salt: str = ""  # of its cached prefixes; empty in a stream
    prompt: tuple[int, ...] = ()  # in a file only
    stop_lengths: tuple[int, ...] = ()  # characters of each stop string, where `params` leaves them out as long


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
    """Blocks appended to a slot's block table; without a group in the logs of versions that had none."""

    slot: int
    blocks: tuple[int, ...]
    group: int = CACHE_GROUP


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
    prefills: tuple[Number, ...] = ()  # rows that compute tokens known when their request joined; older logs have none
    drafts: tuple[tuple[int, ...], ...] = ()  # tokens that each row verifies; () when there are none
    freed_blocks: tuple[FreedBlocks, ...] = ()  # blocks that left the end of a slot's block table, before the new ones

    @property
    def kinds(self) -> tuple[RowKind, ...]:
        return tuple([self.kind_of(row) for row in range(len(self.counts))])

    def end_of(self, row: int) -> int:
        """The position behind the tokens that a row computed, without drafts that were not accepted."""
        accepted = len((self.sampled or self.tokens)[row]) if self.drafts and self.drafts[row] else self.counts[row]
        return self.starts[row] + accepted

    def kind_of(self, row: int) -> RowKind:
        """The kind of a row; in older logs every row of several tokens is a prefill, and no other."""
        drafted = self.drafts and self.drafts[row]
        is_prefill = row in self.prefills or (self.counts[row] > 1 and not drafted)
        return RowKind.PREFILL if is_prefill else RowKind.DECODE


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


Entry = Run | Request | Command | Step | Sent | Refusal | Engine | Gap


class LogError(ValueError):
    """Invalid content of an event log; the message is one line for a person."""


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Entry)
encode = _encoder.encode
encode_lines = _encoder.encode_lines


def line_of(entry: Entry) -> bytes:
    """Returns the line of an entry, with its line end."""
    return encode_lines([entry])  # msgspec 0.22 never frees the iterator of any other sequence


def decode(line: bytes | str) -> Entry:
    """Returns the entry of a line; raises LogError if it is none."""
    try:
        entry: Entry = _decoder.decode(line)
    except msgspec.MsgspecError as error:
        raise LogError(f"this is not an entry of an event log ({error})") from error
    wrong = ""
    if isinstance(entry, Step):
        wrong = _wrong_step(entry)
    elif isinstance(entry, Run):
        wrong = _wrong_run(entry)
    if wrong:
        raise LogError(f"this is not an entry of an event log ({wrong})")
    return entry


def _wrong_step(step: Step) -> str:
    """What contradicts itself in a step; "" if nothing does."""
    rows = len(step.numbers)
    needed: tuple[Sized, ...] = (step.slots, step.starts, step.counts)
    others: tuple[Sized, ...] = (step.padding, step.tokens, step.sampled, step.drafts)
    if any(len(column) != rows for column in needed) or any(len(column) not in (0, rows) for column in others):
        return f"the columns of step {step.step} differ in length"
    if step.drafts and not (step.sampled or step.tokens):
        return f"step {step.step} has drafts and no tokens"
    if len(set(step.numbers)) != rows:
        return f"step {step.step} has two rows of one request"
    if rows and min(step.counts) < 1:
        return f"a row of step {step.step} has no tokens"
    if max((*step.held, *step.failed, *step.prefills), default=-1) >= rows:
        return f"step {step.step} names a row that it does not have"
    if step.stop is not None and all(refused.number != step.stop.first_blocked for refused in step.refused):
        return f"step {step.step} stops at a request that it does not name"
    return _wrong_scheduling(step.configured) if step.configured is not None else ""


def _wrong_run(run: Run) -> str:
    limits = run.limits
    for name, most in (("num_blocks", MAX_BLOCKS), ("num_host_blocks", MAX_BLOCKS), ("block_size", MAX_TOKENS),
                       ("max_num_seqs", MAX_SEQS), ("max_num_batched_tokens", MAX_TOKENS),
                       ("max_model_len", MAX_TOKENS), ("max_passes", MAX_TOKENS), ("watermark_blocks", MAX_BLOCKS)):
        if getattr(limits, name) > most:
            return f"{name} is {getattr(limits, name)}, more than {most}"
    if not 0 <= run.depth <= MAX_DEPTH:
        return f"depth is {run.depth}"
    if run.learned is not None and (wrong := _wrong_learned(run.learned)):
        return wrong
    return _wrong_scheduling(run.scheduling)


def _wrong_learned(learned: Learned) -> str:
    for sums in learned.sizes.values():
        numbers = (sums.weight, *sums.products, *sums.totals)
        if not all(0 <= number < MAX_SUM and math.isfinite(number) for number in numbers) or not sums.totals[2] > 0:
            return "its step times are no sums"
    try:
        StepTimeModel(learned)
    except (ValueError, ArithmeticError):
        return "its step times cannot be fitted"
    return ""


def _wrong_scheduling(scheduling: Scheduling) -> str:
    if not 1 <= scheduling.max_num_batched_tokens <= MAX_TOKENS:
        return "its steps have no tokens" if scheduling.max_num_batched_tokens < 1 else "its steps have too many tokens"
    return "" if 1 <= scheduling.max_num_seqs <= MAX_SEQS else f"its slots are {scheduling.max_num_seqs}"


def read(lines: Iterable[bytes]) -> Iterator[Entry]:
    """Yields the entries in `lines`, without an incomplete last line.

    Raises:
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
            raise LogError(f"line {number}: {error}") from error


def read_file(path: Path | str) -> Iterator[Entry]:
    """Yields the entries of a file, read lazily.

    Raises:
        LogError: the file cannot be read, or is no event log.
    """
    try:
        with Path(path).open("rb") as file:
            yield from read(iter(lambda: file.readline(MAX_LINE + 1), b""))
    except OSError as error:
        raise LogError(f"{path}: {error.strerror}") from error
