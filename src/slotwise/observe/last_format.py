"""Reads the event log of the last release: each of its entries as today's.

There a step was one flat entry: rows, ends and counters side by side.  A step that failed had the changes of all plans
given up then as one, without their rows, so a replay compares its record in that form (`merged`).
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import msgspec

from slotwise.core import reasons
from slotwise.core.params import PoolingSpec, SamplingSpec
from slotwise.core.record import (
    NO_PLAN,
    NO_RESULT,
    NO_STEP,
    Admission,
    CompiledGrammar,
    Copy,
    Counters,
    Decision,
    FreedBlocks,
    Inputs,
    NewBlocks,
    Outcome,
    Preemption,
    Proposing,
    RankSpan,
    ReceivedBlocks,
    RequestEnd,
    RowKind,
    StepPlan,
    StepRecord,
    StepResult,
    Stop,
)
from slotwise.core.request import NO_SLO, KVTransfer, RequestSpec
from slotwise.core.scheduler_limits import SLO
from slotwise.engine.messages import Add, Timing
from slotwise.engine.scheduling import Scheduling
from slotwise.observe.event_log import CommandEntry, EngineLost, Entry, Gap, Refusal, RequestEntry, Run, Sent

Ns = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
NS = 1e-9


class _FlatRequest(msgspec.Struct, tag_field="kind", tag="request", rename={"slo": "terms"}, gc=False):
    number: int
    id: str
    ns: Ns
    num_prompt: int
    params: SamplingSpec
    seed: int
    received_ns: Ns = 0
    read_ns: Ns = 0
    tokenised_ns: Ns = 0
    output_tokens: int = 0
    queue_timeout: float = 0.0
    slo: SLO = NO_SLO
    salt: str = ""
    prompt: tuple[int, ...] = ()
    stop_lengths: tuple[int, ...] = ()
    prediction: tuple[int, ...] = ()
    pooling: PoolingSpec | None = None
    adapter: int = 0
    adapter_name: str = ""
    kv: KVTransfer | None = None


class _SlotBlocks(NamedTuple):
    slot: int
    blocks: tuple[int, ...]
    group: int


class _FlatStep(msgspec.Struct, tag_field="kind", tag="step",
                rename={"released_slots": "leaves", "new_blocks": "grants"}, gc=False):
    step: int
    started_ns: Ns
    ended_ns: Ns
    planned: tuple[Ns, ...] = ()
    taken: tuple[Ns, ...] = ()
    numbers: tuple[int, ...] = ()
    slots: tuple[int, ...] = ()
    starts: tuple[int, ...] = ()
    counts: tuple[int, ...] = ()
    padding: tuple[int, ...] = ()
    held: tuple[int, ...] = ()
    tokens: tuple[tuple[int, ...], ...] = ()
    sampled: tuple[tuple[int, ...], ...] = ()
    failed: tuple[int, ...] = ()
    admitted: tuple[Admission, ...] = ()
    preempted: tuple[Preemption, ...] = ()
    refused: tuple[Decision, ...] = ()
    stop: Stop | None = None
    ended: tuple[RequestEnd, ...] = ()
    released_slots: tuple[int, ...] = ()
    new_blocks: tuple[_SlotBlocks, ...] = ()
    saves: tuple[Copy, ...] = ()
    loads: tuple[Copy, ...] = ()
    configured: Scheduling | None = None
    failure: str = ""
    num_running: int = 0
    num_waiting: int = 0
    num_free_blocks: int = 0
    prefills: tuple[int, ...] = ()
    drafts: tuple[tuple[int, ...], ...] = ()
    forced: tuple[tuple[int, ...], ...] = ()
    compiled: tuple[CompiledGrammar, ...] = ()
    arrivals: tuple[ReceivedBlocks, ...] = ()
    acknowledged: tuple[str, ...] = ()
    freed_blocks: tuple[FreedBlocks, ...] = ()
    draft_limit: str = ""
    proposing: Proposing | None = None
    expired_blocks: tuple[FreedBlocks, ...] = ()
    ranks: tuple[RankSpan, ...] = ()


_decoder = msgspec.json.Decoder(Run | _FlatRequest | CommandEntry | _FlatStep | Sent | Refusal | EngineLost | Gap)


def entry_of(line: bytes | str) -> Entry:
    """Returns the entry of a line.  Raises msgspec.MsgspecError, ValueError: it is none."""
    entry: Any = _decoder.decode(line)
    if isinstance(entry, _FlatRequest):
        return _request(entry)
    return _record(entry) if isinstance(entry, _FlatStep) else entry


def _request(flat: _FlatRequest) -> RequestEntry:
    spec = RequestSpec(
        flat.prompt, flat.params, flat.seed, flat.salt, flat.slo, flat.pooling, flat.adapter, flat.adapter_name,
        flat.kv, flat.prediction, flat.output_tokens, flat.queue_timeout, flat.stop_lengths)
    timing = Timing(flat.received_ns, flat.read_ns, flat.tokenised_ns)
    return RequestEntry(flat.ns, flat.num_prompt, Add(flat.number, spec, timing, flat.id))


def _record(flat: _FlatStep) -> StepRecord:
    prefills = frozenset(flat.prefills)
    if flat.prefills and not 0 <= min(prefills) <= max(prefills) < len(flat.numbers):
        raise ValueError(f"step {flat.step} names a row that it does not have")
    kinds = tuple([RowKind.PREFILL if row in prefills else RowKind.DECODE for row in range(len(flat.numbers))])
    new_blocks = tuple([NewBlocks(slot, group, blocks) for slot, blocks, group in flat.new_blocks])
    plan = StepPlan(
        flat.step, flat.started_ns * NS if flat.step != NO_STEP else 0.0, flat.released_slots, (), flat.freed_blocks,
        new_blocks, flat.numbers, flat.slots, flat.starts, flat.counts, flat.drafts, (), kinds, flat.padding, flat.held,
        flat.preempted, flat.refused, flat.stop, flat.saves, flat.loads, flat.draft_limit, flat.expired_blocks,
        flat.admitted)
    outcome = Outcome(None, (), flat.ended, flat.failure)
    result = NO_RESULT
    if flat.step != NO_STEP:
        tokens = flat.sampled or flat.tokens
        objections = {end.request_id: end.message for end in flat.ended if end.reason == "rejected"}
        result = StepResult(
            flat.step, tokens, failed=flat.failed, forced=flat.forced, proposing=flat.proposing, ranks=flat.ranks,
            objections=_objections([objections.get(flat.numbers[row], "") for row in flat.failed
                                    if row < len(flat.numbers)]))
        if flat.sampled:
            outcome = outcome._replace(tokens=flat.tokens)
    plans = () if plan == NO_PLAN else (plan,)
    inputs = Inputs(flat.planned, flat.taken, flat.compiled, flat.arrivals, flat.acknowledged, flat.configured)
    counters = Counters(flat.num_running, flat.num_waiting, flat.num_free_blocks)
    return StepRecord(flat.started_ns, flat.ended_ns, plans, result, outcome, inputs, counters)


def _objections(messages: list[str]) -> tuple[str, ...]:
    return tuple(messages) if any(messages) else ()


def _new_columns(part: Any) -> dict[str, Any]:
    """Returns the columns of a part of a record that the last release did not have, with their defaults."""
    return {name: default for name, default in part._field_defaults.items() if name not in COLUMNS}


COLUMNS = _FlatStep.__struct_fields__
NEW_IN_PLAN, NEW_IN_OUTCOME = _new_columns(StepPlan), _new_columns(Outcome)


def _last_reason(reason: str) -> str:
    """The reason that the last release gave in the place of one that it did not have."""
    return {reasons.LOAD_LIMIT: reasons.TOKEN_BUDGET, reasons.TOKEN_PENDING: reasons.OUTRANKED}.get(reason, reason)


def merged(record: StepRecord) -> StepRecord:
    """Returns a record as the last release had it: with its columns and its reasons.

    A failed step has the changes of all plans, as one.
    """
    record = record._replace(outcome=record.outcome._replace(**NEW_IN_OUTCOME), plans=tuple([
        plan._replace(**NEW_IN_PLAN, refused=tuple([Decision(name, _last_reason(why)) for name, why in plan.refused]),
                      stop=plan.stop and plan.stop._replace(reason=_last_reason(plan.stop.reason)))
        for plan in record.plans]))
    if record.step != NO_STEP or not record.plans:
        return record
    whole: dict[str, Any] = {name: tuple([one for plan in record.plans for one in getattr(plan, name)]) for name in (
        "released_slots", "freed_blocks", "new_blocks", "preempted", "saves", "loads", "expired_blocks", "admitted")}
    plan = NO_PLAN._replace(**whole)
    return record._replace(plans=() if plan == NO_PLAN else (plan,))
