"""The form of a StepRecord in messages and in the event log: objects with the names of the core's columns.

Columns at their defaults are left out.  The types follow from the core's, so a column stands there alone; what only the
executor needs of a plan is in no message.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any, get_type_hints

import msgspec
from msgspec.structs import astuple

from slotwise.core.record import NO_OUTCOME, NO_RESULT, Counters, Inputs, Outcome, StepPlan, StepRecord, StepResult
from slotwise.engine.scheduling import Scheduling

OF_EXECUTOR = ("new_requests", "num_logits")  # columns of a plan
TYPES: dict[str, Any] = {"configured": Scheduling | None}  # of columns whose type the core does not know
EMPTY: dict[Any, Any] = {int: 0, float: 0.0, str: ""}


def _form(part: Any) -> tuple[Any, Any]:
    """Returns the struct of a part of a record, and what takes its fields out of one."""
    hints = get_type_hints(part) | TYPES
    names = [name for name in part._fields if name not in OF_EXECUTOR]
    defaults = {name: EMPTY.get(hints[name], ()) for name in names} | part._field_defaults
    if "stop" in hints:
        defaults["stop"] = None
    columns = [(name, hints[name], defaults[name]) for name in names]
    struct = msgspec.defstruct(part.__name__, columns, omit_defaults=True, gc=False)
    return struct, itemgetter(*[part._fields.index(name) for name in names])


_Plan, _plan_columns = _form(StepPlan)
_Result, _result_columns = _form(StepResult)
_Outcome, _outcome_columns = _form(Outcome)
_Inputs, _input_columns = _form(Inputs)
_Counters, _counter_columns = _form(Counters)
NO_INPUTS, NO_COUNTERS = Inputs(), Counters()
_HEAD: Sequence[Any] = (
    ("started_ns", int), ("ended_ns", int), ("plans", tuple.__class_getitem__((_Plan, ...)), ()),
    ("result", _Result | None, None),
    ("outcome", _Outcome | None, None), ("inputs", _Inputs | None, None), ("counters", _Counters | None, None))

# A record in a message.  `num_parts`: of its outputs, that were sent before it (`ipc.messages_of`).
StepReport: Any = msgspec.defstruct(
    "StepReport", [*_HEAD, ("num_parts", int, 0)], tag="step", omit_defaults=True, gc=False)
# A record in the event log.
StepEntry: Any = msgspec.defstruct(
    "StepEntry", _HEAD, tag_field="kind", tag="step", omit_defaults=True, gc=False)


def packed(record: StepRecord, form: Any) -> Any:
    """Returns a record in a form that can be encoded: StepReport or StepEntry."""
    started, ended, plans, result, outcome, inputs, counters = record
    return form(
        started, ended, tuple([_Plan(*_plan_columns(plan)) for plan in plans]),
        None if result is NO_RESULT else _Result(*_result_columns(result)),
        None if outcome == NO_OUTCOME else _Outcome(*_outcome_columns(outcome)),
        None if inputs == NO_INPUTS else _Inputs(*_input_columns(inputs)),
        None if counters == NO_COUNTERS else _Counters(*_counter_columns(counters)))


def unpacked(form: Any) -> StepRecord:
    """Returns the record of a decoded form."""
    return StepRecord(
        form.started_ns, form.ended_ns, tuple([_plan(*astuple(plan)) for plan in form.plans]),
        NO_RESULT if form.result is None else StepResult(*astuple(form.result)),
        NO_OUTCOME if form.outcome is None else Outcome(*astuple(form.outcome)),
        NO_INPUTS if form.inputs is None else Inputs(*astuple(form.inputs)),
        NO_COUNTERS if form.counters is None else Counters(*astuple(form.counters)))


def _plan(step: int, now: float, released_slots: Any, *columns: Any) -> StepPlan:
    """Returns a plan of its columns without those of the executor."""
    values = [step, now, released_slots, *columns]
    for index in _GAPS:
        values.insert(index, ())
    return StepPlan(*values)


_GAPS = sorted(map(StepPlan._fields.index, OF_EXECUTOR))
