"""Drafts: how many a step verifies, in addition to the rows it computes in any case (`interfaces.Proposer`).

Drafts are planned last, from what all rows and admissions leave of the token budget, the time budget and the blocks.
So they are the first that a step under pressure goes without: a draft delays no prompt, and no request waits or is
preempted for one.

    tokens   |■ decode rows ■|■■■ prefill chunks ■■■|d d d d|      |
    0                                                         budget
"""

from __future__ import annotations

from collections.abc import Sequence

from slotwise.core.interfaces import DraftRow, Proposer
from slotwise.core.kv_manager import KVManager
from slotwise.core.plan_builder import PlanBuilder
from slotwise.core.reasons import TIME_BUDGET
from slotwise.core.record import Proposing, RowKind
from slotwise.core.request import Request
from slotwise.core.step_time import StepTimeModel, Work, work_of

DECODE = RowKind.DECODE
MAX_STEP_DRAFTS = 128  # each has a row of logits in memory
NO_MATCH, RESTING, NO_GAIN, MAX_DRAFTS, NO_ROOM = "no_match", "resting", "no_gain", "max_drafts", "no_room"
MEASURING = "measuring"
DRAFT_LIMITS = {  # why a step has no more drafts, in addition to TOKEN_BUDGET, SHORT_STEP and TIME_BUDGET
    NO_MATCH: "no lookup knows how the rows go on",
    RESTING: "lookups of the rows gave nothing lately, and are tried again some tokens later",
    NO_GAIN: "another would take more time than it is expected to save",
    MAX_DRAFTS: "the rows that could have more have as many as the settings allow, or the step has 128",
    NO_ROOM: "the rows' outputs end, or there are no free blocks for more",
    MEASURING: "the step shows what a step of its size takes without drafts, of which few were measured",
}


class Drafting:
    """Adds the drafts of a proposer to planned steps; without a proposer, nothing."""

    def __init__(self, kv: KVManager, times: StepTimeModel, proposer: Proposer | None) -> None:
        self.proposer = proposer
        self._kv = kv
        self._times = times
        self._resting = 0  # steps in which no row is due unless a request joins, and why
        self._why = ""

    @property
    def needs_step_times(self) -> bool:
        """Whether the number of drafts depends on predicted step times."""
        return self.proposer is not None

    def waits(self, request: Request) -> bool:
        """Whether a decoding row leaves out this step, to draft from its token in flight."""
        return request.pending > 0 and self.proposer is not None and self.proposer.waits(request)

    def add(self, builder: PlanBuilder) -> None:
        """Add drafts to decoding rows without a token in flight."""
        if self.proposer is None:
            return
        if self._resting and not builder.new_requests:
            self._resting -= 1
            builder.draft_limit = self._why
            return
        self._resting = 0
        if not (places := self._places(builder)):
            return
        due = self.proposer.due([builder.rows[place][0] for place in places])
        if not due.places:
            builder.draft_limit = self._why = due.reason
            self._resting = due.rest if len(places) == builder.num_rows else 0
            return
        work = work_of([row[1] for row in builder.rows], builder.counts)
        most = self._most(builder, work, self.proposer, len(places))
        if most < 1:
            builder.draft_limit = builder.shortage if builder.budget < 1 else TIME_BUDGET
            return
        rows = [self._row(builder.rows[places[at]][0], builder.num_rows) for at in due.places]
        proposal = self.proposer.propose(rows, len(places), work, most)
        builder.draft_limit = proposal.reason or _shortage(builder, most)
        for at, drafts in zip(due.places, proposal.drafts, strict=True):
            if drafts:
                self._plan(places[at], drafts, builder)

    def _places(self, builder: PlanBuilder) -> list[int]:
        """Returns the rows of one token that sample it and have none in flight; held rows are not among them."""
        return [place for place, (request, _, count, _, kind) in enumerate(builder.rows)
                if kind is DECODE and count == 1 and request.pending == 1 and not request.reason]

    def _row(self, request: Request, spare: int) -> DraftRow:
        """Args: spare: blocks that stay free.  With steps in flight, plain rows need theirs before this commit."""
        limit = min(request.max_len - 1, self._kv.largest_capacity(request, spare)) - len(request.tokens)
        return DraftRow(request, max(0, limit))

    def _most(self, builder: PlanBuilder, work: Work, proposer: Proposer, num_rows: int) -> int:
        """Returns how many drafts the token budget and the time budget leave, at most MAX_STEP_DRAFTS."""
        most = min(builder.budget, MAX_STEP_DRAFTS)
        if builder.time is None or not self._times.is_trained or most < 1:
            return most
        limit = builder.time.seconds
        context = work.context // work.rows + 1  # of a draft

        def takes(number: int) -> bool:
            verifying = self._times.seconds(work.with_drafts(number, number * context))
            return verifying + proposer.seconds(num_rows, number) <= limit

        if takes(most):
            return most
        fits = 0
        while most - fits > 1:
            number = (fits + most) // 2
            fits, most = (number, most) if takes(number) else (fits, number)
        return fits

    def _plan(self, place: int, drafts: tuple[int, ...], builder: PlanBuilder) -> None:
        """Plan the drafts of a row, or as many as its blocks have room for: rows before it may have taken the rest."""
        request = builder.rows[place][0]
        blocks = self._kv.extend(request, len(request.tokens) + len(drafts), builder.now)
        if blocks is None:
            drafts, builder.draft_limit = drafts[: request.capacity - len(request.tokens)], NO_ROOM
        else:
            builder.new_blocks += blocks
        if drafts:
            builder.add_drafts(place, drafts)

    # -- notifications -------------------------------------------------------------------------------------------

    def committed(
        self, requests: Sequence[Request], drafts: Sequence[Sequence[int]], proposing: Proposing | None,
    ) -> None:
        if self.proposer is not None:
            self.proposer.committed(requests, drafts, proposing)

    def finished(self, request: Request) -> None:
        if self.proposer is not None:
            self.proposer.finished(request)


def _shortage(builder: PlanBuilder, most: int) -> str:
    """Why a step has no more than `most` drafts."""
    if most == builder.budget:
        return builder.shortage
    return MAX_DRAFTS if most == MAX_STEP_DRAFTS else TIME_BUDGET
