"""A step that was planned and is not committed yet, and who stands in it."""

from __future__ import annotations

from collections.abc import Iterator
from operator import add, attrgetter
from typing import NamedTuple

from slotwise.core.plan import StepPlan, StepResult
from slotwise.core.request import Request

ID, SLOT, EPOCH, TOKENS = map(attrgetter, ("request_id", "slot", "epoch", "tokens"))


class Lineup(NamedTuple):
    """The requests that rows belong to, and what stays theirs while nobody comes or goes: columns."""

    requests: tuple[Request, ...] = ()
    request_ids: tuple[str, ...] = ()
    slots: tuple[int, ...] = ()
    epochs: tuple[int, ...] = ()
    tokens: tuple[list[int], ...] = ()  # the requests' own, which grow

    @classmethod
    def of(cls, requests: tuple[Request, ...]) -> Lineup:
        return cls(requests, *(tuple(map(column, requests)) for column in (ID, SLOT, EPOCH, TOKENS)))

    def beside(self, others: Lineup) -> Lineup:
        """These rows, then those of `others`."""
        if not self.requests or not others.requests:
            return self if self.requests else others
        return Lineup(*map(add, self, others))


class Leg(NamedTuple):
    """Of a step, the rows that cruise (see `core/cruise.py`): a token each, which the next follows."""

    lineup: Lineup
    starts: tuple[int, ...]
    full: tuple[Request, ...]  # those who have computed a block to its end when the step is committed
    gone: list[int]  # slots of those who cruise no more, though the step is in flight


class Flight(NamedTuple):
    """A planned step, and who stands in it, each in the epoch it was planned in: those who cruise, then the others."""

    plan: StepPlan
    leg: Leg
    others: Lineup
    lineup: Lineup

    @property
    def requests(self) -> tuple[Request, ...]:
        return self.lineup.requests

    def declared(self, result: StepResult, ended: set[str]) -> Iterator[tuple[Request, str]]:
        """Those whom the executor ended, complete or unable to sample, but for the `ended`."""
        for rows, reason in ((result.complete, "stop"), (result.failed, "error")):
            for row in rows:
                request = self.requests[row]
                if not request.reason and request.request_id not in ended:
                    yield request, reason
