"""The event log: requests, plans and results of a run, as one stream of entries.

    Run                               an engine is ready, with its settings
    RequestEntry, CommandEntry        sent to the engine, in this order
    StepRecord                        one for every record of the engine (`core/record.py`)
    Sent                              a response is complete
    Refusal, EngineLost, Gap          a request refused; an engine lost; entries missing

A file has one JSON entry per line; `GET /events` streams the same lines.  Requests have small integer ids, in order of
arrival; their names stand once in the RequestEntry.  Times are monotonic nanoseconds of one clock, except those called
`seconds`; `Run.started_unix` relates them to the calendar.  The timeline page, explanations, metrics of a log and the
replay are folds over these entries, live or from a file.

A log begins with a `Run`, which names its format.  A log of the last release is read as well (`last_format.py`); every
reader refuses another one.

A file is complete, and can be replayed.  A stream omits prompts and salts; it begins with the last `Run` and the
`RequestEntry` of each unfinished request, and after a `Gap` it begins like that again: readers drop the requests they
had.  In a file the entries that a `Gap` counts are lost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Annotated, Any, Literal

import msgspec

from slotwise.core.record import DiskNews, StepPlan, StepRecord
from slotwise.core.request import RequestSpec
from slotwise.core.scheduler_limits import SchedulerLimits
from slotwise.core.speculation.speculation_settings import Speculation
from slotwise.core.step_time import Learned, StepTimeModel
from slotwise.engine.messages import Add, Timing
from slotwise.engine.record_codec import StepEntry, packed, unpacked
from slotwise.engine.scheduling import Scheduling
from slotwise.errors import printable
from slotwise.version import __version__

FORMAT = 2  # to be raised with every change that an older reader would misunderstand
LAST_FORMAT = 1  # of the last release, which `last_format.py` reads
MAX_VERSION = 32  # characters of a version that an error repeats
MAX_LINE = 1 << 26  # bytes
LOST = "lost"  # the state of an engine
MAX_BLOCKS = 1 << 24  # of a cache; a replay keeps a few dozen bytes for each
MAX_SEQS = 1 << 20
MAX_TOKENS = 1 << 31  # of a row, and of any limit
MAX_DEPTH = 64
MAX_GROUPS = 1024  # of the cache
MAX_RANKS = 1024
MAX_SECONDS = 2**62 * 1e-9  # of a clock
MAX_SUM = 1e60  # of what a step-time model has learned
Number = Annotated[int, msgspec.Meta(ge=0, le=2**53)]  # of a request, or a count
Ns = Annotated[int, msgspec.Meta(ge=0, le=2**62)]

class LogError(ValueError):
    """Invalid content of an event log; the message is one line for a person."""


class FormatError(LogError):
    """An event log of another format."""


class _Head(msgspec.Struct):
    """What every format keeps of its first line."""

    kind: Literal["run"]
    format: int | None = None
    version: str = ""


_head_decoder = msgspec.json.Decoder(_Head)


def check_format(line: bytes | str) -> None:
    """Raises FormatError if a line begins a log of another format."""
    try:
        head = _head_decoder.decode(line)
    except msgspec.MsgspecError:
        return
    if head.format in (FORMAT, LAST_FORMAT) or (head.format is None and not head.version):
        return
    named = "no format" if head.format is None else f"format {head.format}"
    writer = f", written by slotwise {printable(head.version[:MAX_VERSION])}" if head.version else ""
    raise FormatError(f"this is an event log of {named}{writer}; slotwise {__version__} reads format {FORMAT}")


# -- entries -----------------------------------------------------------------------------------------------------------


FINE = 64  # pieces at the beginning of a prompt that have one block each


def piece_ends(num_prompt: int, block_size: int) -> Iterator[int]:
    """Yields where the pieces of a prompt end: at each of its first blocks, then at every second one, every fourth, ...

    So the length of a common prefix is known to within a few percent, and a long prompt has few pieces.
    """
    end, size = 0, block_size
    while True:
        for _ in range(FINE if size == block_size else FINE // 2):
            end += size
            if end > num_prompt:
                return
            yield end
        size *= 2


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
    """A generation was requested.  The engine handles it later: see `Inputs.handled`."""

    ns: Ns  # sent to the engine
    num_prompt: Number
    add: Add  # as it was sent, in a file; a stream has `RequestSpec.public`
    pieces: tuple[int, ...] = ()  # in the ring, which has no prompts: a digest up to each end of `piece_ends`

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


class CommandEntry(_Entry, tag="command"):
    """The engine received a command to end `number` for `reason`, or to apply `scheduling` from its next plan on."""

    ns: Ns
    number: int = -1
    reason: str = ""
    scheduling: Scheduling | None = None


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


class EngineLost(_Entry, tag="engine"):
    """The engine is lost.  A record that ends all its requests follows; the next engine begins with a `Run`."""

    ns: Ns
    state: str
    message: str = ""


class Gap(_Entry, tag="gap"):
    """`missed` entries are missing here: the writer or the reader could not keep up."""

    missed: Number


Entry = Run | RequestEntry | CommandEntry | StepRecord | Sent | Refusal | EngineLost | Gap
OTHERS = Run | RequestEntry | CommandEntry | Sent | Refusal | EngineLost | Gap


# -- lines -------------------------------------------------------------------------------------------------------------

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(OTHERS | StepEntry)


def encode(entry: Entry) -> bytes:
    """Returns an entry as JSON."""
    return _encoder.encode(_form(entry))


def encode_lines(entries: Iterable[Entry]) -> bytes:
    """Returns the lines of entries."""
    return _encoder.encode_lines(list(map(_form, entries)))


def _form(entry: Entry) -> Any:
    return packed(entry, StepEntry) if isinstance(entry, StepRecord) else entry


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
    return decoded(line, entry_of)


def decoded(line: bytes | str, unchecked: Callable[[bytes | str], Entry]) -> Entry:
    """Returns the entry of a line, by a function that decodes it.

    Raises:
        FormatError: it begins a log of another format.
        LogError: it is none.
    """
    try:
        entry = unchecked(line)
    except (msgspec.MsgspecError, ValueError) as error:
        check_format(line)
        raise LogError(f"this is not an entry of an event log ({error})") from error
    wrong = ""
    if isinstance(entry, StepRecord):
        wrong = wrong_step(entry)
    elif isinstance(entry, RequestEntry):
        wrong = wrong_request(entry)
    elif isinstance(entry, Run):
        check_format(line)
        wrong = wrong_run(entry)
    if wrong:
        raise LogError(f"this is not an entry of an event log ({wrong})")
    return entry


def entry_of(line: bytes | str) -> Entry:
    """Returns the entry of a line, unchecked.  Raises msgspec.MsgspecError, ValueError: it is none."""
    entry: Any = _decoder.decode(line)
    return unpacked(entry) if isinstance(entry, StepEntry) else entry


# -- what decoding cannot see: entries that contradict themselves, and sizes beyond any engine's ---------------------


def wrong_request(entry: RequestEntry) -> str:
    """What contradicts itself in a request; "" if nothing does."""
    if len(entry.spec.prompt) not in (0, entry.num_prompt):
        return f"request {entry.number} has {len(entry.spec.prompt)} of {entry.num_prompt} tokens"
    timing = entry.timing
    if any(not 0 <= ns < 2**62 for ns in (timing.received_ns, timing.read_ns, timing.tokenized_ns)):
        return f"request {entry.number} was received at no time"
    return ""


def wrong_step(record: StepRecord) -> str:
    """What contradicts itself in a record; "" if nothing does."""
    if (record.result.step < 0 and record.result.tokens) or (record.result.step >= 0) > len(record.plans):
        return "a result has no plan"
    if not (0 <= record.started_ns < 2**62 and 0 <= record.ended_ns < 2**62):
        return f"step {record.step} was made at no time"
    if min(record.counters[:4]) < 0 or max(record.counters[:4]) > 2**53:
        return f"the counters of step {record.step} are no counts"
    if any(not 0 <= ns < 2**62 for ns in (*record.inputs.planned, *record.inputs.handled)):
        return f"step {record.step} was planned at no time"
    disk = record.inputs.disk or DiskNews()
    if not all(0 <= number < 2**62 for number in disk[2:]):
        return f"step {record.step} counts less than nothing on disk"
    if not all(0 <= one.num_blocks <= MAX_TOKENS and 0 <= one.timeout < MAX_SECONDS for one in disk.found):
        return f"step {record.step} found a prompt on disk that cannot be"
    ids = [one[0] for part in (record.ended, record.admitted, record.preempted, record.inputs.compiled,
                               record.inputs.arrivals, disk.found, disk.arrivals) for one in part]
    if ids and not 0 <= min(ids) <= max(ids) <= 2**53:
        return f"step {record.step} names a request that cannot be"
    if any(min(each) < 0 for each in record.admitted) or any(each.num_lost < 0 for each in record.preempted) or any(
            each.num_output < 0 for each in record.ended) or any(each.num_blocks < 0
                                                                 for each in (*record.inputs.arrivals, *disk.arrivals)):
        return f"step {record.step} counts less than nothing"
    for lookup in record.lookups:
        ends = [span.end for span in lookup.spans]
        if not 0 <= lookup.request_id <= 2**53 or any(not 0 <= end <= MAX_TOKENS for end in ends) or any(
                not 0 <= span.at < MAX_SECONDS or not 0 <= span.position <= MAX_TOKENS
                or not -1 <= span.request_id <= 2**53 for span in lookup.spans):
            return f"step {record.step} looked up a prompt that cannot be"
    for plan in record.plans:
        if wrong := _wrong_plan(plan):
            return wrong
    return _wrong_result(record)


def _wrong_plan(plan: StepPlan) -> str:
    rows = len(plan.request_ids)
    needed: tuple[Sized, ...] = (plan.slots, plan.starts, plan.counts, plan.kinds)
    others: tuple[Sized, ...] = (plan.padding, plan.drafts)
    if any(len(column) != rows for column in needed) or any(len(column) not in (0, rows) for column in others):
        return f"the columns of step {plan.step} differ in length"
    if len(set(plan.request_ids)) != rows:
        return f"step {plan.step} has two rows of one request"
    if rows and min(plan.counts) < 1:
        return f"a row of step {plan.step} has no tokens"
    if rows and (min(*plan.request_ids, *plan.starts, *plan.slots, *plan.padding, 0) < 0
                 or max(*plan.starts, *plan.counts, *plan.padding, *plan.slots, 0) > MAX_TOKENS
                 or max(plan.request_ids) > 2**53):
        return f"a row of step {plan.step} is out of range"
    if plan.held and not 0 <= min(plan.held) <= max(plan.held) < rows:
        return f"step {plan.step} names a row that it does not have"
    if plan.stop is not None and all(refused.request_id != plan.stop.first_blocked for refused in plan.refused):
        return f"step {plan.step} stops at a request that it does not name"
    if plan.stop is not None and not 0 <= plan.stop.num_behind <= 2**53:
        return f"step {plan.step} stops at no number of requests"
    return ""


def _wrong_result(record: StepRecord) -> str:
    result, rows = record.result, len(record.plan.request_ids)
    columns: tuple[Sized, ...] = (result.tokens, record.tokens, result.forced)
    if any(len(column) not in (0, rows) for column in columns) or result.step != record.plan.step:
        return f"the columns of step {record.step} differ in length"
    if record.plan.drafts and not result.tokens:
        return f"step {record.step} has drafts and no tokens"
    if result.failed and not 0 <= min(result.failed) <= max(result.failed) < rows:
        return f"step {record.step} names a row that it does not have"
    if result.proposing is not None and not (0 <= result.proposing.seconds < MAX_SUM and min(result.proposing) >= 0):
        return f"step {record.step} proposed drafts in no time"
    if any(not (0 <= rank < MAX_RANKS and 0 <= started <= ended < 2**62) for rank, started, ended in result.ranks):
        return f"a rank of step {record.step} worked in no time"
    configured = record.inputs.configured
    return _wrong_scheduling(configured) if isinstance(configured, Scheduling) else ""


def wrong_run(run: Run) -> str:
    """What contradicts itself, or is too large, in the settings of an engine; "" if nothing does."""
    limits = run.limits
    for name, most in (("num_blocks", MAX_BLOCKS), ("num_host_blocks", MAX_BLOCKS), ("block_size", MAX_TOKENS),
                       ("max_num_seqs", MAX_SEQS), ("max_num_batched_tokens", MAX_TOKENS),
                       ("max_model_len", MAX_TOKENS), ("max_passes", MAX_TOKENS), ("max_chunk", MAX_TOKENS),
                       ("watermark_blocks", MAX_BLOCKS), ("stages", MAX_DEPTH)):
        if getattr(limits, name) > most:
            return f"{name} is {getattr(limits, name)}, more than {most}"
    if len(limits.windows) > MAX_GROUPS or max(limits.windows) > MAX_TOKENS:
        return f"it has {len(limits.windows)} cache groups, of windows up to {max(limits.windows)}"
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
