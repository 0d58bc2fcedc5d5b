"""The replicas behind one address, and where each request is: the one owner of this state.

    add ──► up ──► lost ──► up again (report)
             └──► draining ──► idle ──► remove

A request is on one replica at a time.  Where the least predicted wait exceeds the longest acceptable one it is shed,
with the seconds after which a retry would find the wait acceptable, if no other request came.

How many replicas a load needs follows from predicted waits and occupied slots, not from the length of a queue.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from slotwise.core.routing.prompt import RoutedRequest
from slotwise.core.routing.replica import Replica, Report
from slotwise.core.routing.routers import Router

MAX_WAIT = 60.0  # seconds, as the replicas' own admission control has it
LONGEST_RETRY = 60  # seconds; OpenAI's client ignores longer ones
FULL = 0.8  # share of occupied slots at which a replica counts as used up
SPARE = 0.6  # used share that the remaining replicas may have after one is removed: no adding and removing in turn


@dataclass(frozen=True, slots=True)
class Shed:
    """A request that no replica is predicted to serve in time."""

    wait: float  # predicted seconds until its first output; 0: no replica may be chosen
    retry_after: int  # seconds


class Fleet:
    """Args: max_wait: predicted seconds to the first output beyond which a request is shed."""

    def __init__(self, router: Router, max_wait: float = MAX_WAIT) -> None:
        self._router = router
        self._max_wait = max_wait
        self._replicas: dict[str, Replica] = {}
        self._placed: dict[str, Replica] = {}  # by request

    # -- replicas ------------------------------------------------------------------------------------------------

    @property
    def replicas(self) -> list[Replica]:
        """In the order in which they were added."""
        return list(self._replicas.values())

    def add(self, name: str) -> None:
        """Adds a replica, which may be chosen after its first report.  Raises ValueError: the name is in use."""
        if name in self._replicas:
            raise ValueError(f"there is a replica {name} already")
        self._replicas[name] = Replica(name, is_up=False)

    def update(self, name: str, report: Report, asked_at: float) -> None:
        """Applies a replica's report: it is up.  Args: asked_at: when the report was requested, in seconds."""
        replica = self._replicas[name]
        replica.update(report, asked_at)
        replica.is_up = True

    def update_cache(
        self, name: str, added: Iterable[int], removed: Iterable[int] = (), *, is_whole: bool = False,
    ) -> None:
        """Changes a replica's index.  Args: is_whole: `added` is all of it."""
        self._replicas[name].update_cache(added, removed, is_whole=is_whole)

    def set_adapters(self, name: str, adapters: Iterable[str], now: float) -> None:
        """Sets the adapters that requests may name on a replica; reports requested before `now` do not change them."""
        self._replicas[name].set_adapters(adapters, now)

    @property
    def adapters(self) -> frozenset[str]:
        """Those that requests may name on some replica."""
        return frozenset[str]().union(*[replica.adapters for replica in self._replicas.values()])

    def drain(self, name: str) -> None:
        """No further request is sent to a replica."""
        self._replicas[name].is_draining = True

    def closed(self, name: str) -> None:
        """A replica accepts no requests until its next report; those it has go on."""
        self._replicas[name].is_up = False

    def lost(self, name: str) -> list[str]:
        """A replica has died.  Returns its unfinished requests, which are no longer on any replica."""
        unfinished = self._replicas[name].lost()
        for request_id in unfinished:
            del self._placed[request_id]
        return unfinished

    def remove(self, name: str) -> list[str]:
        """Forgets a replica.  Returns its unfinished requests, which are no longer on any replica."""
        unfinished = self.lost(name)
        del self._replicas[name]
        return unfinished

    def usable(self, without: Collection[str] = (), *, for_prompts: bool = False) -> list[Replica]:
        """Replicas that may be chosen to answer, or to compute prompts for others."""
        return [replica for replica in self._replicas.values()
                if replica.is_up and not replica.is_draining and replica.name not in without
                and (replica.report.sends_prompts if for_prompts else replica.report.serves)]

    # -- requests ------------------------------------------------------------------------------------------------

    def route(self, request: RoutedRequest, now: float, without: Collection[str] = (), *, for_prompts: bool = False,
              ) -> Replica | Shed:
        """Sends a request to a replica, unless none is there or none would serve it in time.

        Args:
            now: seconds.
            without: replicas that have failed it.
            for_prompts: its prompt is to be computed for another replica.

        Raises:
            ValueError: it is on a replica.
        """
        if request.request_id in self._placed:
            raise ValueError(f"request {request.request_id} is on a replica")
        usable = [one for one in self.usable(without, for_prompts=for_prompts) if one.has(request.adapter)]
        if not usable:
            return Shed(0.0, 1)
        wait = min([replica.wait(request) for replica in usable])
        if wait > self._max_wait:
            return Shed(wait, max(1, min(LONGEST_RETRY, ceil(wait - self._max_wait))))
        chosen = self._router.choose(request, usable)
        chosen.sent(request, now)
        self._placed[request.request_id] = chosen
        return chosen

    def predicted_wait(self) -> float:
        """The least predicted wait of a short request, in seconds; 0 without replicas."""
        return min([replica.wait(RoutedRequest("")) for replica in self.usable()], default=0.0)

    def first_output(self, request_id: str, now: float) -> None:
        """A request has its first output.  Does nothing if it is on no replica."""
        if (replica := self._placed.get(request_id)) is not None:
            replica.first_output(request_id, now)

    def finished(self, request_id: str) -> None:
        """A request has ended, or has left its replica to go elsewhere.  Does nothing if it is on no replica."""
        if (replica := self._placed.pop(request_id, None)) is not None:
            replica.finished(request_id)

    def check(self) -> None:
        """Raises AssertionError unless each request is on exactly one replica of the fleet."""
        counted = sum(replica.num_sent for replica in self._replicas.values())
        assert counted == len(self._placed)
        assert all(self._replicas.get(replica.name) is replica for replica in self._placed.values())


# -- how many replicas -------------------------------------------------------------------------------------------------


class ReplicaLoad(NamedTuple):
    """The load of a replica."""

    wait: float  # predicted seconds until a request that comes now has its first output
    busy: float  # requests that run or wait, per slot


def replicas_for(loads: Sequence[ReplicaLoad], target_wait: float) -> int:
    """Returns the number of replicas at which none would be more than used up.

    A replica is used up where `FULL` of its slots are occupied, or where its predicted wait is `target_wait` seconds.
    One is removed only where the others then have at most `SPARE`.
    """
    used = sum(max(load.busy / FULL, load.wait / target_wait) for load in loads)
    number = len(loads)
    if used > number:
        return ceil(used)
    return max(1, min(number, ceil(used / SPARE)))
