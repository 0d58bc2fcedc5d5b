"""StepRecord: what the engine was told before one step, and what it planned, computed and published.

    inputs ─► Scheduler.schedule ─► plans ─► executor ─► result ─► Scheduler.commit ─► outcome        counters

The same object goes to clients, metrics, the event log, the timeline and the replay.  Together with the commands, the
records hold every input of an engine, each clock reading that affects a decision included, so that a replay can compare
all the rest.

A record without a step (`step` NO_STEP) tells what happened between two steps, or that a step failed.  It has no
result, and the plans that the failure discarded.
"""

from __future__ import annotations

from typing import NamedTuple

from slotwise.core.step import Admission, Arrival, Preemption, StepPlan, StepResult, TokenLogprobs

NO_STEP = -1  # in place of a step's number
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


class Inputs(NamedTuple):
    """What the engine read and was told since the last record, before the plan was made."""

    planned: tuple[int, ...] = ()  # monotonic nanoseconds: start of each plan made since the last record
    handled: tuple[int, ...] = ()  # monotonic nanoseconds: when each command was handled, in order
    compiled: tuple[CompiledGrammar, ...] = ()
    arrivals: tuple[Arrival, ...] = ()  # blocks of prompts that other engines have computed
    acknowledged: tuple[str, ...] = ()  # transfers whose blocks other engines have read
    configured: object = None  # the `engine.scheduling.Scheduling` applied since, from the next plan on; None: none


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
    plans: tuple[StepPlan, ...] = ()  # as executed, without `new_requests`: one, or all that a failure discarded
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
    def preempted(self) -> tuple[Preemption, ...]:
        return tuple([one for plan in self.plans for one in plan.preempted])

    @property
    def verified(self) -> list[tuple[int, int]]:
        """For each row with drafts, their number, and how many of them were right."""
        return [(len(drafts), max(0, len(tokens) - 1))
                for drafts, tokens in zip(self.plan.drafts, self.result.tokens, strict=False) if drafts]

    def end_of(self, row: int) -> int:
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
