"""Replicas and engines that are killed under load: no stream says what it must not, and the door stays healthy."""

from __future__ import annotations

import json

import pytest

from attacks import ROOT
from attacks.replica_losses import run
from slotwise.measure.bench.results import environment, write_json

RESULTS = ROOT / "benchmarks" / "results" / "replica-losses.json"


@pytest.mark.drill
@pytest.mark.timeout(3600)
def test_lost_replicas_and_engines_falsify_no_stream(pytestconfig: pytest.Config) -> None:
    found = run(25, pytestconfig.getoption("--attack-seed"), seconds=600.0)
    if pytestconfig.getoption("--record"):
        runs = json.loads(RESULTS.read_text())["runs"] if RESULTS.exists() else []
        write_json(RESULTS, {"version": 1, "runs": [*runs, {"environment": environment(), **found}]})
    assert found["num_wrong"] == found["health_not_200"] == 0, found
