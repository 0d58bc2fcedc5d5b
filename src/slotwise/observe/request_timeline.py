"""The history of one request: its stages, its times, and what it has computed.

    received      sent to the engine    first slot   first token    slot lost     slot            ended    last byte
       │ tokenizing │       queue          │  prefill   │   decode   │ preempted │ recompute │ ... │  sending  │

A stage begins when the one before has ended; the waits of a `queue` or `preempted` stage sum to its length.
`observe.fold` applies the events of a log.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import nlargest
from typing import NamedTuple

import msgspec

from slotwise.core import cache_causes
from slotwise.core.record import PromptSpan, RequestEnd
from slotwise.engine.scheduling import Scheduling
from slotwise.observe.event_log import RequestEntry

SHAPES = ("cmpl-", "chatcmpl-", "msg-", "resp-", "embd-")  # prefixes of response ids
STEP_UNDER_WAY = "step_under_way"  # it arrived during a step, and is in no plan yet
TOKENIZING, QUEUE, PREFILL, DECODE, PREEMPTED, RECOMPUTE, SENDING = (
    "tokenizing", "queue", "prefill", "decode", "preempted", "recompute", "sending")
WAITING = (QUEUE, PREEMPTED)
NO_SLOT = -1


def num_of(cause: str, spans: Sequence[PromptSpan]) -> int:
    """Tokens of a prompt with that cause."""
    ends = [0, *[span.end for span in spans]]
    return sum([end - start for span, start, end in zip(spans, ends, ends[1:], strict=False) if span.cause == cause])


class Stage(msgspec.Struct, array_like=True, gc=False):
    """A stage of a request.  Times are monotonic nanoseconds."""

    name: str
    start_ns: int
    end_ns: int = 0  # 0: it is the current one
    waited: dict[str, int] = msgspec.field(default_factory=dict)  # nanoseconds, by reason


class LastEnds(NamedTuple):
    """The two latest ends (`RequestTimeline.over_ns`) of the choices of a response; equal if two choices share one."""

    latest: int
    before: int

    @classmethod
    def of(cls, together: Iterable[RequestTimeline]) -> LastEnds:
        return cls(*nlargest(2, [0, 0, *[one.over_ns for one in together]]))


class RequestTimeline(msgspec.Struct, gc=False):
    """The history of a request.  Times are monotonic nanoseconds; 0: not yet, or unknown."""

    request: RequestEntry
    position: int  # of its entry in the log
    scheduling: Scheduling | None  # at its arrival
    engine_ns: int = 0  # its engine was ready, with an empty prefix cache
    stages: list[Stage] = msgspec.field(default_factory=list)  # in sequence
    is_whole: bool = True  # all its steps are known
    taken_ns: int = 0  # handled by the engine
    admitted_ns: int = 0  # for the first time
    first_token_ns: int = 0  # published, as `last_token_ns`
    last_token_ns: int = 0
    left_ns: int = 0  # its client disconnected, or it was aborted
    ended_ns: int = 0
    last_byte_ns: int = 0
    siblings_ended_ns: int = 0  # end of the last of the other choices of its response
    over_at: int = -1  # position of the step with its end; -1: the engine has not ended it
    end_reason: str = ""
    message: str = ""
    slot: int = NO_SLOT
    cached: int = 0  # tokens found in the cache at its last admission
    num_cached: int = 0  # at its first one
    prompt_spans: tuple[PromptSpan, ...] = ()  # of its known tokens, at its first one
    computed: int = 0  # tokens computed since its last admission, `cached` included
    lost: int = 0  # computed before its last preemption
    reached: int = 0  # most of those of any preemption
    num_preemptions: int = 0
    num_published: int = 0  # tokens
    num_at_end: int = 0  # tokens, by the engine
    num_retained: int = 0  # tokens that its retention keeps in the cache, as of its end
    reason: str = STEP_UNDER_WAY  # why it waits or has no row; empty if it has one
    attributed_ns: int = 0  # the waiting before is attributed

    # -- reading -------------------------------------------------------------------------------------------------

    @property
    def num_received(self) -> int:
        """Prompt tokens that another engine had computed, at its first admission."""
        return num_of(cache_causes.RECEIVED, self.prompt_spans)

    @property
    def stage(self) -> str:
        return self.stages[-1].name

    @property
    def closed_stages(self) -> list[Stage]:
        return [stage for stage in self.stages if stage.end_ns]

    @property
    def start_ns(self) -> int:
        """Start of the first stage."""
        return self.stages[0].start_ns

    @property
    def closed_ns(self) -> int:
        """End of the last stage that has ended."""
        return max([self.request.ns, *(stage.end_ns for stage in self.stages)])

    @property
    def is_waiting(self) -> bool:
        return self.stage in WAITING

    @property
    def is_running(self) -> bool:
        return self.stage in (PREFILL, DECODE, RECOMPUTE)

    @property
    def received_ns(self) -> int:
        return self.request.timing.received_ns or self.request.ns

    @property
    def arrived_ns(self) -> int:
        """From here on a server's latencies count: the request was read whole."""
        return self.request.timing.read_ns or self.request.ns

    @property
    def tokenized_ns(self) -> int:
        return self.request.timing.tokenized_ns or self.request.ns

    @property
    def ended(self) -> bool:
        """True once its client has left, or has all its tokens; the engine may hear of it later (`over_at`)."""
        return bool(self.end_reason)

    @property
    def end_ns(self) -> int:
        """End of all work for the request; 0 before."""
        return max(self.last_byte_ns, self.left_ns) or self.ended_ns

    @property
    def over_ns(self) -> int:
        """End of its own work, without the sending; 0 before."""
        return self.left_ns or self.ended_ns

    @property
    def total_ns(self) -> int:
        """Time from its arrival to `end_ns`; 0 before."""
        return self.end_ns - self.received_ns if self.end_ns else 0

    @property
    def num_output(self) -> int:
        return self.num_at_end or self.num_published

    @property
    def num_sampled(self) -> int:
        """Tokens sampled since its last admission or before; the last ones may not be published yet."""
        past = self.computed - self.request.num_prompt
        return past + 1 if past >= 0 and self.computed else 0

    @property
    def response_id(self) -> str:
        """The engine's id without its serial number."""
        return self.request.id.rpartition("-")[0] or self.request.id

    def is_named(self, name: str) -> bool:
        """True if `name` is the engine's id, the response's, or the client's `X-Request-Id`."""
        return name in (self.request.id, self.response_id) or self.response_id in [shape + name for shape in SHAPES]

    def belongs_to(self, tenant: str) -> bool:
        """True if the request's salt begins with `tenant`, or `tenant` is empty."""
        return not tenant or self.request.spec.salt == tenant or self.request.spec.salt.startswith(tenant + ":")

    # -- events --------------------------------------------------------------------------------------------------

    def meet(self, last: LastEnds) -> None:
        """Records the end of the other choices of its response."""
        self.siblings_ended_ns = last.before if self.over_ns == last.latest else last.latest

    def enter(self, stage: str, now_ns: int) -> None:
        """Ends the current stage, and begins another."""
        current = self.stages[-1]
        current.end_ns = max(now_ns, current.start_ns)
        self.stages.append(Stage(stage, current.end_ns))

    def preempt(self, reason: str, lost: int, now_ns: int) -> None:
        """The plan took its slot.  A step in flight may have computed more than `lost` tokens."""
        self.lost = max(lost, self.computed)
        self.reached = max(self.reached, self.lost)
        self.num_preemptions += 1
        self.slot, self.computed, self.reason = NO_SLOT, 0, reason
        self.enter(PREEMPTED, now_ns)
        self.attributed_ns = self.stages[-1].start_ns

    def admit(self, cached: int, now_ns: int) -> None:
        """The plan gave it a slot."""
        self.cached, self.reason = cached, ""
        if not self.admitted_ns:
            self.admitted_ns, self.num_cached = now_ns, cached
        self.enter(RECOMPUTE if self.num_preemptions else PREFILL, now_ns)

    def command(self, reason: str, now_ns: int) -> None:
        """Its client has left, or has all it wants (`stop`)."""
        if not self.ended:
            self.end_reason, self.ended_ns = reason, now_ns
            if reason != "stop":
                self.left_ns = now_ns

    def end(self, end: RequestEnd, now_ns: int, position: int) -> None:
        """The engine ended it."""
        self.num_at_end, self.message, self.over_at = end.num_output, end.message, position
        self.num_retained = end.num_retained
        if not self.ended:
            self.end_reason, self.ended_ns = end.reason, now_ns
        self.slot = NO_SLOT
        self.enter(SENDING, min(now_ns, self.ended_ns))
        if self.last_byte_ns:
            self.send(self.last_byte_ns)

    def send(self, last_ns: int) -> None:
        """Its response was complete at `last_ns`; perhaps before the engine ended it."""
        self.last_byte_ns = last_ns
        if self.stage == SENDING:
            self.stages[-1].end_ns = max(last_ns, self.stages[-1].start_ns)
