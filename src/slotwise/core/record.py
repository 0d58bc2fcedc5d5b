"""StepPlan, StepResult and StepRecord: what scheduler, executor and every observer exchange about a step.

    inputs ─► Scheduler.schedule ─► plans ─► executor ─► result ─► Scheduler.commit ─► outcome        counters

A plan is data: the executor runs it, the event log stores it, the timeline draws it, the simulator predicts its time.
It holds columns, not row objects: a step of 1,000 rows must cost about a microsecond a row to plan and commit.

    PREFILL   known tokens     |■■■■■■■■■■■■■■■■■■■■■■|       tokens known at admission
              already computed |■■■■■■■■|                     starts[i]
              this step        |        ■■■■■■■■■|            counts[i]; num_logits[i] 0: mid-prompt

    DECODE    known tokens     |■■■■■■■■■■■■■■■■■■■■■■|
              this step        |                     ■dd|     the last token and drafts[i]; num_logits[i] 3
              result           |                      tt|     one draft accepted, and the token after it

Logits are wanted at the last `num_logits[i]` positions of row i: at 1 for the next token, at 1 + drafts to verify
these, at all `counts[i]` for the log-probabilities of a prompt.  A row samples if it wants logits and reaches the end
of the known tokens; its result has 1 to 1 + drafts tokens.  A row of a pooled request wants hidden states there in
place of logits, and samples nothing.

A draft is a token, or PROPOSED: the executor's draft model proposes it before the forward pass, and the result names
it, as `drafts[i]`, which may be fewer than were planned.  A row's drafts are all of one kind.

Blocks belong to *cache groups*, sets of layers that keep the same positions (`core/cache_groups.py`); most models have
one, group 0.  With a draft model there is only that: its layers use the same blocks, and may lack positions
(`compute/runner/draft_model_runner.py`).

Static and dynamic batches waste computation, and the plan records it: `padding[i]` tokens in addition to those of row
i, and rows in `held`, which have their last token already and are computed again until the whole batch has ended.

A record is the whole of it: what the engine was told before one step, and what it planned, computed and published.
Clients, metrics, the timeline and the replay read the same object, and the event log keeps what `logged()` returns.
Together with the commands, the records hold every input of an engine, each clock reading that affects a decision
included, so that a replay can compare all the rest.

A record without a step (`step` NO_STEP) says what happened between two steps, or that a step failed.  It has no
result, and the plans that the failure discarded.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from slotwise.core.request import RequestSpec

CACHE_GROUP = 0  # the first cache group, which most models have alone
FREED = -1  # in place of a block that is behind a window, and is never read
PROPOSED = -1  # a draft that the executor proposes
NO_STEP = -1  # in place of a step's number
ANOTHER_REQUEST = -1  # in place of the number of another tenant's request


class RowKind(IntEnum):
    """Whether a row computes tokens known at admission, or tokens sampled since and drafts."""

    PREFILL = 0
    DECODE = 1


class NewRequest(NamedTuple):
    """A request enters a slot.  After a preemption it has output tokens already."""

    request_id: int
    slot: int
    spec: RequestSpec
    stop_ids: tuple[int, ...]  # tokens that end the request; masked until `params.min_tokens` are sampled
    sampled: tuple[int, ...] = ()  # its output so far

    @property
    def num_prompt(self) -> int:
        return len(self.spec.prompt)

    @property
    def tokens(self) -> tuple[int, ...]:
        """All known tokens."""
        return self.spec.prompt + self.sampled


class NewBlocks(NamedTuple):
    """Blocks appended to a slot's block table of a cache group; FREED ones may come first when a request joins."""

    slot: int
    group: int
    blocks: tuple[int, ...]


class FreedBlocks(NamedTuple):
    """Blocks that leave a slot's block table of a cache group.

    In `freed_blocks` these are the table's last blocks, whose drafts were not accepted; in `expired_blocks` its first
    blocks, which no later position attends to.
    """

    slot: int
    group: int
    num_blocks: int


class Copy(NamedTuple):
    """One block copied between device and host memory."""

    source: int
    target: int


class ReceivedBlocks(NamedTuple):
    """Blocks of a prompt were received."""

    request_id: int
    num_blocks: int  # of the prompt, from its first block on, that are there now
    is_last: bool  # no more will arrive
    failure: str = ""  # why others will not


class PrefixOnDisk(NamedTuple):
    """A new request's prompt begins with blocks that are on disk and are faster to read than to compute."""

    request_id: int
    num_blocks: int  # of the prompt, from its first block on; those that are cached in memory are not read
    timeout: float  # seconds; blocks that have not been read by then are computed


class DiskNews(NamedTuple):
    """Blocks found, read, written and dropped by the prefix cache on disk since the last record."""

    found: tuple[PrefixOnDisk, ...] = ()  # prompts of new requests
    arrivals: tuple[ReceivedBlocks, ...] = ()  # blocks that were read
    num_written: int = 0  # blocks that were written
    num_read: int = 0  # blocks that were read
    num_dropped: int = 0  # blocks that were not written: too many waited, their memory was needed, or the disk failed
    num_damaged: int = 0  # files that did not match their names
    num_bytes: int = 0  # bytes of all files


class Decision(NamedTuple):
    """A request that was not planned, and the reason (`core/reasons.py`)."""

    request_id: int
    reason: str


class Admission(NamedTuple):
    """A request that got a slot."""

    request_id: int
    num_cached: int  # tokens found in the prefix cache, in memory or on disk, and not computed


class PromptSpan(NamedTuple):
    """A span of an admitted request's known tokens; it begins where the one before ends."""

    end: int  # position after its last token
    cause: str  # why it was found in the prefix cache, or was not (`core/cache_causes.py`)
    at: float = 0.0  # seconds; when it was evicted, to the second if another tenant's request got its first block
    request_id: int = ANOTHER_REQUEST  # for which it was evicted
    position: int = 0  # the first token that differs from the nearest cached prompt, where it diverged


class CacheLookup(NamedTuple):
    """What the prefix cache had of an admitted request's tokens."""

    request_id: int
    spans: tuple[PromptSpan, ...]  # of all known tokens, in order


class Preemption(NamedTuple):
    """A running request whose slot and blocks were taken: it is queued and computed again.

    Where `on_pressure` is ERROR it has ended instead, and `num_lost` is 0.
    """

    request_id: int
    reason: str  # `core/reasons.py`
    num_lost: int  # computed tokens


class Stop(NamedTuple):
    """Where admission stopped: `first_blocked` waits for `reason`, and `num_behind` other requests wait, too."""

    reason: str
    first_blocked: int
    num_behind: int
    reopens_at: float | None = None  # seconds; when time alone ends the wait


class StepPlan(NamedTuple):
    """One forward pass.  Plans are executed strictly in order of `step`.

    Before the forward pass, `saves` are executed first, then the changes of slots and blocks in the order of these
    columns, with `expired_blocks` before `new_blocks`, and `loads` last.
    """

    step: int
    now: float  # seconds
    released_slots: tuple[int, ...]  # slots released since the last plan
    new_requests: tuple[NewRequest, ...]
    freed_blocks: tuple[FreedBlocks, ...]
    new_blocks: tuple[NewBlocks, ...]
    request_ids: tuple[int, ...]
    slots: tuple[int, ...]
    starts: tuple[int, ...]
    counts: tuple[int, ...]
    drafts: tuple[tuple[int, ...], ...]  # () when no row has any; PROPOSED for each that the executor proposes
    num_logits: tuple[int, ...]
    kinds: tuple[RowKind, ...]
    padding: tuple[int, ...]  # () when no row has any
    held: tuple[int, ...]  # indices of rows
    preempted: tuple[Preemption, ...]
    refused: tuple[Decision, ...]
    stop: Stop | None
    saves: tuple[Copy, ...] = ()  # device blocks to host blocks, before anything else
    loads: tuple[Copy, ...] = ()  # host blocks to device blocks, before the forward pass
    draft_limit: str = ""  # why there are no more drafts (`core/drafting.py`); "" where none can be
    expired_blocks: tuple[FreedBlocks, ...] = ()  # before `new_blocks`
    admitted: tuple[Admission, ...] = ()  # the `new_requests`
    lookups: tuple[CacheLookup, ...] = ()  # of the admitted requests: what the prefix cache had of each prompt

    @property
    def num_rows(self) -> int:
        return len(self.slots)

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step, padding included."""
        return sum(self.counts) + sum(self.padding)

    @property
    def has_proposed(self) -> bool:
        """Whether the executor proposes drafts of a row."""
        return any(drafts[:1] == (PROPOSED,) for drafts in self.drafts)

    def with_drafts(self, drafts: tuple[tuple[int, ...], ...]) -> StepPlan:
        """Returns the plan as it is executed with `drafts`, of which a row may have fewer than were planned."""
        fewer = [len(planned) - len(named) for planned, named in zip(self.drafts, drafts, strict=True)]
        return self._replace(
            drafts=drafts if any(drafts) else (),
            counts=tuple([count - less for count, less in zip(self.counts, fewer, strict=True)]),
            num_logits=tuple([wanted - less for wanted, less in zip(self.num_logits, fewer, strict=True)]))


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one sampled position: natural logarithm, after penalties and bias, before truncation."""

    logprob: float  # of the sampled token
    rank: int  # 1: the most probable token
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


class Proposing(NamedTuple):
    """What proposing the drafts of a step took, of the step's own time."""

    seconds: float  # of the executor
    passes: int  # of the draft model, one after another
    tokens: int  # that it computed, in all passes


class RankSpan(NamedTuple):
    """When a rank of a model that several processes compute worked on a step; monotonic nanoseconds."""

    rank: int  # its number; 0 samples
    started_ns: int  # where it waits for a stage before it, when that one's result arrived
    ended_ns: int  # its part of the step was done


class StepResult(NamedTuple):
    """The output of a step, aligned with the plan's rows.  A row that did not sample has no tokens.

    The tokens of a row with drafts are those it would have sampled without: the accepted drafts, then one more.
    """

    step: int
    tokens: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[TokenLogprobs, ...], ...] = ()  # () if no row returns them, else aligned with `tokens`
    failed: tuple[int, ...] = ()  # rows that could not sample; other rows are unaffected
    prompt_logprobs: tuple[tuple[TokenLogprobs, ...], ...] = ()  # () if no row has any; of tokens starts[i] + 1 on
    pooled: tuple[bytes, ...] = ()  # () if no row has any; float32, little-endian, of rows that end a pooled prompt
    forced: tuple[tuple[int, ...], ...] = ()  # () if no row has any; tokens that a grammar forces after those sampled
    objections: tuple[str, ...] = ()  # why each of `failed` cannot go on, "" for a fault; () if there are only faults
    drafts: tuple[tuple[int, ...], ...] = ()  # of each row, those executed, where the plan has PROPOSED ones; else ()
    proposing: Proposing | None = None  # None: no draft model was run
    ranks: tuple[RankSpan, ...] = ()  # the spans of all ranks, of the first stage's two; () where there is one rank

    def executed(self, plan: StepPlan) -> StepPlan:
        """Returns `plan` with the drafts that this result names."""
        return plan.with_drafts(self.drafts) if self.drafts else plan

    def check(self, plan: StepPlan) -> None:
        """Raises RuntimeError unless this may be a result of `plan`."""
        if self.step != plan.step or len(self.tokens) != plan.num_rows:
            raise RuntimeError(f"step {plan.step} has {plan.num_rows} rows; the result of step {self.step} has "
                               f"{len(self.tokens)}")
        if self.drafts and len(self.drafts) != len(plan.drafts):
            raise RuntimeError(f"the result of step {plan.step} has drafts of {len(self.drafts)} rows")
        rows = zip(plan.drafts, self.drafts or plan.drafts, self.tokens, strict=False)
        for planned, drafts, tokens in rows:
            if PROPOSED in drafts or len(drafts) > len(planned):
                raise RuntimeError(f"step {plan.step} names drafts {drafts} for {planned}")
            if planned and tokens[:-1] != drafts[: max(0, len(tokens) - 1)]:
                raise RuntimeError(f"step {plan.step} yields {tokens}, which do not start with drafts {drafts}")


NO_PLAN = StepPlan(NO_STEP, 0.0, (), (), (), (), (), (), (), (), (), (), (), (), (), (), (), None)
NO_RESULT = StepResult(NO_STEP, ())

Tokens = tuple[int, ...]
Logprobs = tuple[TokenLogprobs, ...]


class CompiledGrammar(NamedTuple):
    """The compilation of a request's grammar has ended; `objection` says why it failed, "" if it did not."""

    request_id: int
    objection: str = ""


class RequestEnd(NamedTuple):
    """The end of a request: `message` explains `rejected`, `timeout`, `shed` and `error`, and is empty otherwise."""

    request_id: int
    reason: str
    num_output: int  # tokens
    message: str = ""
    num_retained: int = 0  # tokens whose blocks its retention claims from here on


class Inputs(NamedTuple):
    """What the engine read and was told since the last record.

    With steps in flight, a part of it came after this record's plan was made.
    """

    planned: tuple[int, ...] = ()  # monotonic nanoseconds: start of each plan made since the last record
    handled: tuple[int, ...] = ()  # monotonic nanoseconds: when each command was handled, in order
    compiled: tuple[CompiledGrammar, ...] = ()
    arrivals: tuple[ReceivedBlocks, ...] = ()  # blocks of prompts that other engines have computed
    acknowledged: tuple[str, ...] = ()  # transfers whose blocks other engines have read
    configured: object = None  # the `engine.scheduling.Scheduling` applied since, from the next plan on; None: none
    disk: DiskNews | None = None  # None: nothing happened there


class Outcome(NamedTuple):
    """What a commit made of the result.

    A row has no tokens here if its request had ended before this commit, and while its batch holds them back; the
    step that completes the batch publishes them all.
    """

    tokens: tuple[Tokens, ...] | None = None  # published of each row; None: those of the result
    logprobs: tuple[Logprobs, ...] = ()  # of these, where they are not the result's; () if no row returns them
    ended: tuple[RequestEnd, ...] = ()
    failure: str = ""  # why the step failed; its rows' requests are among the `ended`


NO_OUTCOME = Outcome()


class Counters(NamedTuple):
    """Of the engine, when the record was made; `num_waiting` counts requests that wait for a slot."""

    num_running: int = 0
    num_waiting: int = 0
    num_free_blocks: int = 0
    num_pinned_blocks: int = 0  # of ended requests, which another engine still reads
    expert_tokens: tuple[tuple[int, ...], ...] = ()  # token counts by layer and expert since the last record with any


class StepRecord(NamedTuple):
    """One step, or what happened between two."""

    started_ns: int  # monotonic nanoseconds
    ended_ns: int
    plans: tuple[StepPlan, ...] = ()  # without `new_requests`: the executed one, or all that a failure discarded
    result: StepResult = NO_RESULT
    outcome: Outcome = NO_OUTCOME
    inputs: Inputs = Inputs()
    counters: Counters = Counters()

    @property
    def plan(self) -> StepPlan:
        """The plan of its result; without one, NO_PLAN."""
        return self.plans[0] if self.result.step != NO_STEP else NO_PLAN

    @property
    def step(self) -> int:
        """The number of its step; NO_STEP: none was completed."""
        return self.result.step

    @property
    def tokens(self) -> tuple[Tokens, ...]:
        """The tokens published, of each row."""
        return self.result.tokens if self.outcome.tokens is None else self.outcome.tokens

    @property
    def logprobs(self) -> tuple[Logprobs, ...]:
        """The log-probabilities of `tokens`; () if no row returns them."""
        return self.result.logprobs if self.outcome.tokens is None else self.outcome.logprobs

    @property
    def ended(self) -> tuple[RequestEnd, ...]:
        return self.outcome.ended

    @property
    def admitted(self) -> tuple[Admission, ...]:
        return tuple([one for plan in self.plans for one in plan.admitted])

    @property
    def lookups(self) -> tuple[CacheLookup, ...]:
        return tuple([one for plan in self.plans for one in plan.lookups])

    @property
    def preempted(self) -> tuple[Preemption, ...]:
        return tuple([one for plan in self.plans for one in plan.preempted])

    @property
    def verified(self) -> list[tuple[int, int]]:
        """For each row with drafts, their number, and how many of them were right."""
        return [(len(drafts), max(0, len(tokens) - 1))
                for drafts, tokens in zip(self.plan.drafts, self.result.tokens, strict=False) if drafts]

    def next_position(self, row: int) -> int:
        """The position after the tokens that a row computed, without drafts that were not accepted."""
        plan = self.plan
        has_drafts = bool(plan.drafts and plan.drafts[row])
        return plan.starts[row] + (len(self.result.tokens[row]) if has_drafts else plan.counts[row])

    def logged(self) -> StepRecord:
        """Returns it as the event log has it: without log-probabilities, vectors and what only metrics count."""
        record = self
        if record.result.logprobs or record.result.prompt_logprobs or record.result.pooled:
            record = record._replace(result=record.result._replace(logprobs=(), prompt_logprobs=(), pooled=()))
        if record.outcome.logprobs:
            record = record._replace(outcome=record.outcome._replace(logprobs=()))
        if record.counters.num_pinned_blocks or record.counters.expert_tokens:
            record = record._replace(counters=record.counters._replace(num_pinned_blocks=0, expert_tokens=()))
        return record
