"""Ray's request router with this package's rule: what it knows of replicas; no cluster.

Ray takes long to import: not while tests are collected.
"""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from slotwise.api.admin.replica_state import AdapterState, ReplicaState
from slotwise.core.step_time import Prediction
from slotwise.fleet.upstream import RoutedPrompt

SECOND = Prediction([1.0, 0.0, 0.0, 0.0, 0.0, 0.0], {kind: {} for kind in ("decode", "first", "prompts", "drafts")}, [])
STEP_TOKENS = 256  # a second


def running(name: str, asked_at: float, *adapters: str) -> Any:
    from ray.serve._private.common import DeploymentID, ReplicaID

    from slotwise.fleet.ray_router import ASKED_AT, STATE

    state = ReplicaState(
        "instance", 0, True, [], [], True, 8, STEP_TOKENS, 0, 1, 0.0, 64.0, SECOND,
        tuple([AdapterState(one, f"/{one}", "", "digest") for one in adapters]))
    return SimpleNamespace(replica_id=ReplicaID(name, DeploymentID("replicas")),
                           routing_stats={STATE: msgspec.json.encode(state).decode(), ASKED_AT: asked_at})


def pending(number: int, model: str = "", size: int = 1024) -> Any:
    return SimpleNamespace(args=(RoutedPrompt(size, (), "", "", model), None, frozenset()),
                           metadata=SimpleNamespace(internal_request_id=str(number)))


def router() -> Any:
    from slotwise.fleet.ray_router import RoutingOnRay

    found = RoutingOnRay.__new__(RoutingOnRay)
    found.initialize_state()
    return found


def chosen(found: Any, replicas: list[Any], request: Any) -> Any:
    ranked = asyncio.run(found.choose_replicas(replicas, request))
    found.on_request_routed(request, ranked[0][0].replica_id, None)
    return ranked[0][0]


def test_a_first_output_is_taken_to_come_when_it_was_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "time", lambda: now)
    found, replicas = router(), [running("a", 999.0)]
    chosen(found, replicas, pending(1))  # 256 tokens: a second
    chosen(found, replicas, pending(2))
    (view,) = found._known.values()
    assert view.queued_tokens == 2 * STEP_TOKENS
    for at, left in ((1000.5, 3), (1001.5, 3), (1004.6, 1)):  # one more is sent, before it 0, 1 and 3 have started
        now = at
        chosen(found, replicas, pending(int(10 * at)))
        assert view.queued_tokens == left * STEP_TOKENS


def test_an_adapter_goes_to_the_replica_that_has_it() -> None:
    found = router()
    replicas = [running("a", 1.0), running("b", 1.0, "poet"), running("c", 1.0)]
    assert {chosen(found, replicas, pending(number, "poet")).replica_id.unique_id for number in range(6)} == {"b"}
    assert len({chosen(found, replicas, pending(10 + number)).replica_id.unique_id for number in range(9)}) > 1
