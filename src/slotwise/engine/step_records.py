"""The parts of a step's record that follow from its plans and from the scheduler's events."""

from __future__ import annotations

from collections.abc import Sequence

from slotwise.core.events import Admitted, Committed, Event, Finished, Preempted, Rejected
from slotwise.core.step import StepPlan, TokenLogprobs
from slotwise.engine.messages import RowEnd, StepRecord

NO_PROBABILITIES = "the model gave no valid probabilities for the next token"  # of a row that failed alone

Tokens = tuple[int, ...]
Logprobs = tuple[TokenLogprobs, ...]


def ends(events: list[Event], error: str = NO_PROBABILITIES) -> tuple[RowEnd, ...]:
    """Returns the ends among `events`; `error` is the message of failed rows without one."""
    found = []
    for event in events:
        if isinstance(event, Finished):
            message = event.message or (error if event.reason in ("error", "rejected") else "")
            found.append(RowEnd(event.request_id, event.reason, event.num_output, message))
        elif isinstance(event, Rejected):
            found.append(RowEnd(event.request_id, "rejected", 0, event.message))
    return tuple(found)


def with_changes(record: StepRecord, plans: Sequence[StepPlan], events: list[Event]) -> StepRecord:
    """Returns `record` with what `plans` change: admissions, preemptions, slots, blocks and block copies."""
    record.released_slots = tuple([slot for plan in plans for slot in plan.released_slots])
    record.freed_blocks = tuple([blocks for plan in plans for blocks in plan.freed_blocks])
    record.expired_blocks = tuple([blocks for plan in plans for blocks in plan.expired_blocks])
    record.new_blocks = tuple([blocks for plan in plans for blocks in plan.new_blocks])
    if any(plan.saves or plan.loads for plan in plans):
        record.saves = tuple([copy for plan in plans for copy in plan.saves])
        record.loads = tuple([copy for plan in plans for copy in plan.loads])
    if any(plan.new_requests for plan in plans):
        record.admitted = tuple([join.request_id for plan in plans for join in plan.new_requests])
        record.cached = tuple([event.num_cached for event in events if isinstance(event, Admitted)])
    if any(plan.preempted for plan in plans):
        lost = {event.request_id: event.num_computed for event in events if isinstance(event, Preempted)}
        record.preempted = tuple([decision for plan in plans for decision in plan.preempted])
        record.lost = tuple([lost.get(request_id, 0) for request_id, _ in record.preempted])
    return record


def published(plan: StepPlan, events: list[Event]) -> tuple[tuple[Tokens, ...], tuple[Logprobs, ...]]:
    """Returns the tokens that the commit of `plan` published per row, and their log-probabilities, () if not requested.

    A row whose request had ended has none, nor has an unfinished prompt or a row whose batch has not drained.
    """
    for event in events:
        if isinstance(event, Committed) and event.step == plan.step:
            if event.request_ids == plan.request_ids:  # all but a few steps
                return event.tokens, event.logprobs if any(event.logprobs) else ()
            place = {request_id: index for index, request_id in enumerate(event.request_ids)}
            rows = [place.get(request_id) for request_id in plan.request_ids]
            tokens = tuple([() if row is None else event.tokens[row] for row in rows])
            if not any(event.logprobs):
                return tokens, ()
            return tokens, tuple([() if row is None else event.logprobs[row] for row in rows])
    return (), ()
