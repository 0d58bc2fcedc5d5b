"""How much of a prompt a step computes: the least of what policy, discipline, token budget and time allow."""

from __future__ import annotations

from slotwise.core.draft import Draft
from slotwise.core.pace import FLOOR
from slotwise.core.request import Request
from slotwise.core.roster import Roster
from slotwise.core.seams import Discipline


class Pieces:
    def __init__(self, roster: Roster, discipline: Discipline) -> None:
        self._roster = roster
        self._discipline = discipline

    def fits(self, start: int, wanted: int, draft: Draft) -> bool:
        """Whether there is time for somebody to begin; where nobody else runs there is."""
        if draft.time is None or not draft.num_rows:
            return True
        least = min(FLOOR, wanted)
        if draft.has_piece:
            return draft.time.fitting(start, wanted) >= least
        return draft.time.lets_begin(start, least)

    def of(self, request: Request, wanted: int, draft: Draft, behind: int = 0) -> int:
        """Of the `wanted` tokens of a prompt those to compute, while `behind` rows follow; 0: there is no time.

        The first piece of a step gets at least FLOOR tokens whatever it takes, so that every prompt comes to its end.
        """
        count = self._allowed(request, wanted, draft, behind)
        if draft.time is None:
            return count
        start = request.num_scheduled
        is_first = not draft.has_piece and request in draft.beginning  # those behind would only make it wait
        fitting = draft.time.fitting(start, count, draft.rests if is_first else 1)
        if fitting < min(FLOOR, count):
            if draft.has_piece:
                return 0
            fitting = min(FLOOR, count)
        count = self._discipline.chunk(count, fitting)
        draft.time.take(start, count)
        draft.has_piece = True
        return count

    def first(self, request: Request, draft: Draft) -> int:
        """The same of one who joins; a short prompt is computed whole where that holds nobody up for long."""
        start, wanted, time = request.num_scheduled, request.unscheduled, draft.time
        if time is None or draft.has_piece or not time.takes_whole(start, wanted):
            return self.of(request, wanted, draft)
        count = self._allowed(request, wanted, draft)
        time.take(start, count)
        draft.has_piece = True
        return count

    def _allowed(self, request: Request, wanted: int, draft: Draft, behind: int = 0) -> int:
        """By policy, discipline and token budget."""
        cap = max(1, self._roster.policy.cap(request, wanted, draft.now))
        return self._discipline.chunk(min(wanted, cap), draft.budget - behind)
