"""Achieved share of the roofline by kind of step (see `core.roofline`), on a machine measured in the same process."""

from __future__ import annotations

from slotwise.core.step import RowKind
from slotwise.core.step_time import Cost, Roofline
from slotwise.engine.messages import StepRecord

NANO = 1e-9
DECODE, MIXED, PREFILL = "decode", "mixed", "prefill"
KINDS = (DECODE, MIXED, PREFILL)


class Tally:
    """The steps of one kind."""

    def __init__(self) -> None:
        self.steps = 0
        self.tokens = 0
        self.seconds = 0.0
        self.bytes_seconds = 0.0  # by memory bandwidth alone
        self.operations_seconds = 0.0  # by compute rate alone
        self.bound_seconds = 0.0  # the larger of both, and at most the time that it took, step by step

    @property
    def achieved(self) -> float:
        """Share of the time that the bound explains."""
        return self.bound_seconds / self.seconds if self.seconds else 0.0


class Achieved:
    """Folds step records into their costs and times, by kind."""

    def __init__(self, roofline: Roofline) -> None:
        self.roofline = roofline
        self.kinds = {kind: Tally() for kind in KINDS}

    def step(self, record: StepRecord) -> None:
        """Count one step; a record without rows is ignored."""
        if not record.counts:
            return
        cost, machine = cost_of(record, self.roofline), self.roofline.machine
        tally = self.kinds[kind_of(record)]
        tally.steps += 1
        tally.tokens += sum(record.counts)
        seconds = (record.ended_ns - record.started_ns) * NANO
        tally.seconds += seconds
        tally.bytes_seconds += cost.bytes / machine.bytes_per_second
        tally.operations_seconds += cost.operations / machine.operations_per_second
        tally.bound_seconds += min(seconds, self.roofline.seconds(cost))


def cost_of(record: StepRecord, roofline: Roofline) -> Cost:
    return roofline.cost(record.starts, record.counts, sum(1 for tokens in record.token_ids if tokens))


def kind_of(record: StepRecord) -> str:
    """Decode: no row of a prompt; prefill: only such rows; mixed: both."""
    if RowKind.PREFILL not in record.kinds:
        return DECODE
    return MIXED if RowKind.DECODE in record.kinds else PREFILL
