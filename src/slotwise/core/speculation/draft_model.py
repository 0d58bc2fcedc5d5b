"""The proposer of a draft model: chooses how many drafts `compute/runner/draft_model_runner.py` proposes for each row.

The number is that of the budget (`budget.py`), with what proposing costs added to what verifying costs:

    (rows + Σ probability that a draft and those before it are right) / (step with drafts + passes of the draft model)

How often drafts are right is known of those that were proposed alone.  So where none are worth their time, one row
tries two of them now and then: in up to 16 steps in succession while they are right, then after 16 steps, and twice as
many each time until drafts are worth their time.  A full batch, whose drafts would not be worth their time if all of
them were right, tries none.

Drafts from texts (a `prediction`, what a grammar forces) cost nothing to propose and come first, row by row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from slotwise.core.drafting import MAX_DRAFTS, MEASURING, NO_GAIN, NO_ROOM
from slotwise.core.interfaces import DraftRow, Due, Proposal, Proposer
from slotwise.core.record import PROPOSED, Proposing
from slotwise.core.request import Request
from slotwise.core.speculation.budget import GRID, LEAST_GAIN, Acceptance, Costs
from slotwise.core.speculation.speculation_settings import Speculation
from slotwise.core.step_time import StepTimeModel, Work, non_negative

NO_REQUEST = -1
PRIOR = (0.7,) * 8  # shares of right drafts by group of positions (`budget.py`), before anything is known
PRIOR_PASS = 0.2  # of the time of a step of one row: a pass of the draft model, before one is measured
TRIED = 2  # drafts of a row that tries whether they have become worth their time
FIRST_REST, MAX_REST = 16, 1024  # steps between two tries
MAX_RIGHT = 16  # tries in succession that were right: these show enough, and drafts are still not worth their time
UNPAID = 16  # steps of a batch that no drafts pay for in which it is not asked again
WORTH_WAITING = 1.0  # right drafts that a row must expect to leave out a step
ALONE = Work(1, 1, 1, 0.0)


class _Row:
    """What is known about one request."""

    __slots__ = ("acceptance", "base")

    def __init__(self, shared: Acceptance) -> None:
        self.acceptance = Acceptance(shared)
        self.base = 0  # tokens known when its drafts, in flight, were planned; 0: it has none there


class _Chosen(NamedTuple):
    counts: list[int]  # drafts of each row
    wants_more: bool


class DraftModelProposer:
    """Leaves drafts to the executor's draft model (see `core.interfaces.Proposer`).

    Args:
        texts: proposes drafts from texts.
        times: the scheduler's, which learns from every step.
    """

    def __init__(self, texts: Proposer, settings: Speculation, times: StepTimeModel) -> None:
        self._texts = texts
        self._num_drafts = settings.num_drafts
        self._times = times
        self._costs = Costs(times)
        self._proposing = ProposingTimes()
        self._shared = Acceptance(PRIOR)
        self._rows: dict[int, _Row] = {}
        self._due_texts: Sequence[int] = ()  # places, among the rows of this step, that may have drafts from texts
        self._steps = 0  # committed
        self._gains = True  # the last step that could have drafts had some
        self._rests = False  # in this step
        self._rests_until, self._num_resting = 0, 0  # a step, and rows: where as many decode, none is due before it
        self._try_at, self._rest = FIRST_REST, FIRST_REST  # the step of the next try, and the steps before it
        self._num_right = 0  # tries in succession that were right
        # The request that tries, until its drafts were verified: it may have to catch up first.
        self._trying = NO_REQUEST

    # -- decisions -----------------------------------------------------------------------------------------------

    def due(self, requests: Sequence[Request]) -> Due:
        if not self._times.is_trained:
            return Due((), NO_GAIN)
        self._due_texts, _, rest = self._texts.due(requests)
        left = self._rests_until - self._steps
        self._rests = left > 0 and len(requests) >= self._num_resting
        return Due(self._due_texts, NO_GAIN, min(left - 1, rest)) if self._rests else Due(range(len(requests)), "")

    def propose(self, rows: Sequence[DraftRow], num_decoding: int, work: Work, most: int) -> Proposal:
        drafts, reason = self._from_texts(rows, num_decoding, work, most)
        if self._rests:
            return Proposal(drafts, reason)
        places = [place for place, given in enumerate(drafts) if not given and rows[place].limit > 0]
        most -= (num_given := sum(map(len, drafts)))
        if not places or most < 1:
            return Proposal(drafts, reason if num_given else NO_ROOM)
        if not num_given and self._costs.measures(work):
            return Proposal(drafts, MEASURING)
        context = work.context // work.rows + 1
        work = work.with_drafts(num_given, num_given * context)
        chosen = self._chosen([rows[place] for place in places], num_decoding, work, most)
        for place, count in zip(places, chosen.counts, strict=True):
            if count:
                drafts[place] = (PROPOSED,) * count
                self._row_of(rows[place].request).base = len(rows[place].request.tokens)
        if not chosen.wants_more:
            return Proposal(drafts, NO_GAIN)
        if sum(chosen.counts) == most:
            return Proposal(drafts, "")
        is_full = any(count == self._num_drafts for count in chosen.counts)
        return Proposal(drafts, MAX_DRAFTS if is_full else NO_ROOM)

    def _from_texts(
        self, rows: Sequence[DraftRow], num_decoding: int, work: Work, most: int,
    ) -> tuple[list[tuple[int, ...]], str]:
        """Returns the drafts from texts, by row, and why there are no more."""
        drafts: list[tuple[int, ...]] = [()] * len(rows)
        if not self._due_texts:
            return drafts, NO_GAIN
        places = range(len(rows)) if self._rests else self._due_texts
        found, reason = self._texts.propose([rows[place] for place in places], num_decoding, work, most)
        for place, given in zip(places, found, strict=True):
            drafts[place] = given
        return drafts, reason

    def seconds(self, num_rows: int, num_drafts: int) -> float:
        return self._takes(-(-num_drafts // num_rows), num_drafts)

    def waits(self, request: Request) -> bool:
        if self._texts.waits(request):
            return True
        if not self._times.is_trained or not (self._gains or self._steps >= self._try_at):
            return False
        return sum(self._row_of(request).acceptance.survival(0, self._num_drafts)) > WORTH_WAITING

    def _chosen(self, rows: Sequence[DraftRow], num_decoding: int, work: Work, most: int) -> _Chosen:
        """Returns the drafts of each of `rows`, none of which `work` has; the step has `num_decoding` decoding rows."""
        context = sum([len(row.request.tokens) for row in rows])
        costs = dict(zip(GRID, self._costs.curve(work, num_decoding, context), strict=True))
        alone = self._times.seconds(Work(num_decoding, num_decoding, context, 0.0) if work.pairs else work.repeated())
        counts, most = [0] * len(rows), min(most, len(rows) * self._num_drafts)

        def rate(number: int, passes: int, right: float) -> float:
            """Expected tokens in the time of a step without drafts."""
            return (num_decoding + right) / (costs[number] + self._takes(passes, number) / alone)

        if alone <= 0 or not any(
                rate(number, -(-number // len(rows)), number) > LEAST_GAIN * num_decoding
                for number in GRID[1:] if number <= most):
            self._gains = False
            self._rests_until, self._num_resting = self._steps + UNPAID, num_decoding
            return _Chosen(counts, wants_more=False)
        found = sorted([
            (-probability, position, place) for place, (request, limit) in enumerate(rows)
            for position, probability in enumerate(
                self._row_of(request).acceptance.survival(0, min(limit, self._num_drafts)))])[:most]
        right, passes, chosen, best = 0.0, 0, 0, LEAST_GAIN * num_decoding
        found = found[: max(number for number in GRID if number <= len(found))]
        for number, (less_probable, position, _) in enumerate(found, 1):
            right, passes = right - less_probable, max(passes, position + 1)
            if number in costs and (reached := rate(number, passes, right)) > best:
                chosen, best = number, reached
        for place, count in Counter([place for _, _, place in found[:chosen]]).items():
            counts[place] = count
        self._gains = chosen > 0
        if self._gains:
            self._rest = FIRST_REST
        else:
            self._try(rows, counts)
            self._rests_until, self._num_resting = 0 if self._trying != NO_REQUEST else self._try_at, num_decoding
        return _Chosen(counts, wants_more=chosen == len(found))

    def _takes(self, passes: int, tokens: int) -> float:
        """Returns the predicted seconds of proposing."""
        if not self._proposing.is_trained:
            return passes * PRIOR_PASS * self._times.seconds(ALONE)
        return self._proposing.seconds(passes, tokens)

    # -- tries ---------------------------------------------------------------------------------------------------

    def _try(self, rows: Sequence[DraftRow], counts: list[int]) -> None:
        """Give a row drafts that are not expected to be worth their time, if that was not tried for long enough."""
        if self._trying == NO_REQUEST:
            if self._steps < self._try_at:
                return
            self._trying = min(rows, key=lambda row: (len(row.request.tokens), row.request.arrival)).request.request_id
        for place, (request, limit) in enumerate(rows):
            if request.request_id == self._trying:
                counts[place] = min(TRIED, limit, self._num_drafts)

    def _tried(self, num_right: int) -> None:
        self._trying = NO_REQUEST
        self._num_right = self._num_right + 1 if num_right else 0
        if 0 < self._num_right < MAX_RIGHT:
            self._try_at = self._steps + 1
            return
        self._num_right, self._rest = 0, min(MAX_REST, 2 * self._rest)
        self._try_at = self._steps + self._rest

    # -- notifications -------------------------------------------------------------------------------------------

    def committed(
        self, requests: Sequence[Request], drafts: Sequence[Sequence[int]], proposing: Proposing | None = None,
    ) -> None:
        self._steps += 1
        if proposing is not None:
            self._proposing.learn(proposing)
            self._compare(requests, drafts or ((),) * len(requests))
        self._texts.committed(requests, drafts)

    def _compare(self, requests: Sequence[Request], drafts: Sequence[Sequence[int]]) -> None:
        """Learn from the drafts that were verified."""
        for request, proposed in zip(requests, drafts, strict=True):
            row = self._rows.get(request.request_id)
            if row is None or not row.base:
                continue
            came, row.base, num_right = request.tokens[row.base :], 0, 0
            if not proposed or not came:  # it has to catch up, or the step failed it
                continue
            while num_right < min(len(came), len(proposed)) and came[num_right] == proposed[num_right]:
                num_right += 1
            row.acceptance.observe(0, num_right, diverged=num_right < min(len(came), len(proposed)))
            if request.request_id == self._trying:
                self._tried(num_right)

    def finished(self, request: Request) -> None:
        self._rows.pop(request.request_id, None)
        if request.request_id == self._trying:
            self._trying = NO_REQUEST
        self._texts.finished(request)

    def _row_of(self, request: Request) -> _Row:
        row = self._rows.get(request.request_id)
        if row is None:
            row = self._rows[request.request_id] = _Row(self._shared)
        return row


FADE = 0.98  # decay at the next step: half is forgotten after 34
RIDGE = (1e-4, 1e-3)  # regularization of each term towards 0, relative to its weight


class ProposingTimes:
    """Predicts the seconds of proposing."""

    def __init__(self) -> None:
        self._products = [[0.0, 0.0], [0.0, 0.0]]
        self._totals = [0.0, 0.0]
        self._coefficients = [0.0, 0.0]

    @property
    def is_trained(self) -> bool:
        return any(self._coefficients)

    def seconds(self, passes: int, tokens: int) -> float:
        """Returns the predicted seconds; 0 while untrained."""
        return self._coefficients[0] * passes + self._coefficients[1] * tokens

    def learn(self, proposing: Proposing) -> None:
        """Learn from a step."""
        seconds, *numbers = proposing
        if seconds <= 0 or not proposing.passes:
            return
        terms = [number / seconds for number in numbers]
        self._totals = [known * FADE + term for known, term in zip(self._totals, terms, strict=True)]
        self._products = [
            [known * FADE + term * other for known, other in zip(row, terms, strict=True)]
            for row, term in zip(self._products, terms, strict=True)]
        self._coefficients = non_negative(self._products, self._totals, RIDGE)
