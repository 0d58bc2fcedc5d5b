"""A router of this package as Ray Serve's request router.

Ray asks for an order of replicas, and announces each request that it sends and that ends; a replica's report comes with
Ray's routing statistics.  First outputs are not announced, so the router assumes them at the predicted time, by the
replica's own step times, or earlier where the replica reports that no request waits.
"""

from __future__ import annotations

import time
from heapq import heappop, heappush
from typing import Any

import msgspec
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from slotwise.api.admin.replica_state import ReplicaState
from slotwise.core.routing.prompt import RoutedRequest
from slotwise.core.routing.replica import Replica
from slotwise.core.routing.routers import ROUTERS, Router
from slotwise.fleet.upstream import RoutedPrompt

STATE, ASKED_AT = "state", "asked_at"  # of routing statistics: a ReplicaState as JSON, and seconds since the epoch


class RoutingOnRay(RequestRouter):  # type: ignore[misc]
    """The arguments of a routed call are a `Prompt`, what is sent, and the names of replicas that have failed it."""

    def initialize_state(self, router: str = "product", seed: int = 0) -> None:
        self._router: Router = ROUTERS[router](seed)
        self._known: dict[str, Replica] = {}
        self._told: dict[str, float] = {}  # by replica: when its last report was asked for
        self._due: list[tuple[float, str, str]] = []  # a heap: predicted first outputs: when, where, whose

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """The chosen replica first, then all others."""
        self._take_first_outputs(time.time())
        views = {self._view(one).name: one for one in candidate_replicas}
        request = self._request(pending_request)
        if request is None or pending_request is None or not candidate_replicas:
            return [candidate_replicas]
        able = [name for name in views if self._known[name].has(request.adapter)] or list(views)
        allowed = [name for name in able if name not in pending_request.args[2]] or able
        chosen = self._router.choose(request, [self._known[name] for name in allowed]).name
        others = [one for name, one in views.items() if name != chosen and name in allowed]
        return [[views[chosen]], others] if others else [[views[chosen]]]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        request, view = self._request(pending_request), self._known.get(replica_id.to_full_id_str())
        if request is not None and view is not None:
            now, wait = time.time(), view.wait(request)
            view.sent(request, now)
            if view.report.prefill_rate:
                heappush(self._due, (now + wait, view.name, request.request_id))

    def _take_first_outputs(self, now: float) -> None:
        """The requests whose first outputs were predicted until now have them, as far as the router knows."""
        while self._due and self._due[0][0] <= now:
            at, name, request_id = heappop(self._due)
            if (view := self._known.get(name)) is not None:
                view.first_output(request_id, at)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        if (view := self._known.get(replica_id.to_full_id_str())) is not None:
            view.finished(internal_request_id)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._known.pop(replica_id.to_full_id_str(), None)

    def _view(self, running: RunningReplica) -> Replica:
        """A replica with its last report."""
        name, stats = running.replica_id.to_full_id_str(), running.routing_stats or {}
        view = self._known.setdefault(name, Replica(name))
        if STATE in stats and self._told.get(name) != stats[ASKED_AT]:
            self._told[name] = stats[ASKED_AT]
            state = msgspec.json.decode(stats[STATE], type=ReplicaState)
            view.update_cache(state.added, is_whole=True)
            view.update(state.report(), stats[ASKED_AT])
        return view

    def _request(self, pending: PendingRequest | None) -> RoutedRequest | None:
        if pending is None or not pending.args or not isinstance(pending.args[0], RoutedPrompt):
            return None
        told = [view.report.piece_tokens for view in self._known.values() if view.report.piece_tokens]
        adapters = frozenset[str]().union(*[view.adapters for view in self._known.values()])
        return pending.args[0].request(
            pending.metadata.internal_request_id, sum(told) / len(told) if told else 0.0, adapters)
