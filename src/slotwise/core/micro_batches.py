"""Micro-batches: which rows a step may have, where a model's layers are divided into stages that compute at once.

    stage 0    | a b | c d | a b | c d |          a step has half of the decode rows, where there are two stages
    stage 1          | a b | c d | a b | c d |

A row's next token is known when the last stage is done, so the row is in no other step before that commit.  Chunks of a
prompt follow each other at once: a stage computes steps in order, and nothing is sampled between them.
"""

from __future__ import annotations

from collections.abc import Sequence

from slotwise.core.plan_builder import PlanBuilder
from slotwise.core.reasons import MICRO_BATCH
from slotwise.core.request import Request
from slotwise.core.request_table import RequestTable
from slotwise.core.step import RowKind


class MicroBatches:
    """Divides running requests among as many steps as there are stages; with one stage a step may have all rows."""

    def __init__(self, table: RequestTable, stages: int) -> None:
        self._table = table
        self._stages = stages

    @property
    def may_fill(self) -> bool:
        """Whether a step planned now may have rows."""
        if self._stages == 1:
            return bool(self._table.unfinished)
        return bool(self._table.waiting and self._table.num_free_slots) or any(
            not request.pending for request in self._table.running.values())

    def share(self, running: Sequence[Request], builder: PlanBuilder) -> Sequence[Request]:
        """Returns those of `running` that the step may have, in order; refuses the others."""
        if self._stages == 1:
            return running
        left = -(-len(self._table.running) // self._stages) - sum(row[-1] is RowKind.DECODE for row in builder.rows)
        ready = []
        for request in running:
            decodes = request.unscheduled == 1 and request.num_scheduled >= request.num_at_join and not request.reason
            if (request.pending and not request.reason) or (decodes and left < 1):
                builder.refuse(request, MICRO_BATCH)
                continue
            left -= decodes
            ready.append(request)
        return ready
