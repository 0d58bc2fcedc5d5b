"""Step records of a few columns, for tests that need no engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slotwise.core.record import (
    NO_PLAN,
    NO_RESULT,
    NO_STEP,
    Admission,
    Counters,
    Inputs,
    Outcome,
    Preemption,
    RowKind,
    StepPlan,
    StepRecord,
    StepResult,
)


def record_of(
    step: int, started_ns: int, ended_ns: int, request_ids: Sequence[Any] = (), slots: Sequence[int] = (),
    starts: Sequence[int] = (), counts: Sequence[int] = (), *, tokens: Sequence[Any] = (), published: Any = None,
    admitted: Sequence[Any] = (), cached: Sequence[int] = (), preempted: Sequence[Any] = (), kinds: Any = None,
    **columns: Any,
) -> StepRecord:
    """Returns a record; each column goes to the part that has it.

    Args:
        published: tokens, where they are not those sampled; as `tokens` beside `sampled`.
        admitted: Admissions, or ids, with as many numbers `cached`.
    """
    if "sampled" in columns:
        published, tokens = tokens, columns.pop("sampled")
    if "taken" in columns:
        columns["handled"] = columns.pop("taken")
    if "lost" in columns:
        preempted = [(*each, lost) for each, lost in zip(preempted, columns.pop("lost"), strict=True)]
    request_ids = columns.pop("numbers", request_ids)
    if cached:
        admitted = [Admission(*each) for each in zip(admitted, cached, strict=True)]
    prefills = columns.pop("prefills", ())
    kinds = kinds if kinds is not None else tuple([
        RowKind.PREFILL if row in prefills else RowKind.DECODE for row in range(len(request_ids))])

    def of(part: Any) -> dict[str, Any]:
        return {name: columns.pop(name) for name in part._fields if name in columns}

    plan = NO_PLAN._replace(
        step=step, now=started_ns * 1e-9, request_ids=tuple(request_ids), slots=tuple(slots), starts=tuple(starts),
        counts=tuple(counts), admitted=tuple(admitted), preempted=tuple([Preemption(*each) for each in preempted]),
        kinds=kinds, **of(StepPlan))
    result = NO_RESULT._replace(step=step, tokens=tuple(tokens), **of(StepResult)) if step != NO_STEP else NO_RESULT
    record = StepRecord(
        started_ns, ended_ns, (plan,) if step != NO_STEP else (), result, Outcome(published, **of(Outcome)),
        Inputs(**of(Inputs)), Counters(**of(Counters)))
    assert not columns, columns
    return record


def admitted_of(record: StepRecord) -> tuple[Any, ...]:
    """The ids of the requests that got a slot."""
    return tuple([one.request_id for one in record.admitted])


def cached_of(record: StepRecord) -> tuple[int, ...]:
    """Of each request that got a slot, the tokens found in the prefix cache."""
    return tuple([one.num_cached for one in record.admitted])
