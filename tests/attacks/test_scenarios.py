"""The drills of one server: every scenario keeps every promise.  Each takes minutes; see `attacks`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import pytest

from attacks import ROOT, attacked, ledger, scenarios
from slotwise.measure.bench.results import environment

RESULTS = ROOT / "benchmarks" / "results" / "reliability-cpu.json"
SCENARIOS: dict[str, Callable[[float], ledger.Row]] = {  # each takes seconds
    "overload": scenarios.overload, "disconnects": scenarios.disconnects, "impossible": scenarios.impossible,
    "small-pool": scenarios.small_pool, "kill": scenarios.killed, "frozen": scenarios.frozen,
    "sigterm": scenarios.sigterm}
ATTACKS: dict[str, Callable[[float, int], ledger.Row]] = {  # each takes seconds and a seed
    "hostile": attacked.hostile, "slow": attacked.slow_clients, "shapes": scenarios.shapes,
    "faults": lambda seconds, seed: attacked.random_faults(seconds, seed)[0]}


@pytest.mark.drill
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", [*SCENARIOS, *ATTACKS])
def test_every_promise_is_kept(name: str, pytestconfig: pytest.Config) -> None:
    seconds, seed = pytestconfig.getoption("--attack-seconds"), pytestconfig.getoption("--attack-seed")
    began = time.perf_counter()
    if name in ATTACKS:
        row, key = ATTACKS[name](seconds, seed), f"{name}-{seconds:g}s-seed{seed}"
    else:
        row, key = SCENARIOS[name](seconds), name
    if pytestconfig.getoption("--record"):
        record(key, {"name": name} | row.as_json()
               | {"seconds": time.perf_counter() - began, "commit": environment()["commit"]})
    assert row.broken == [], row.seen


def record(key: str, row: dict[str, object]) -> None:
    """Writes a row next to those of scenarios that did not run: scenarios in their order, then attacks."""
    rows = (json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else {}) | {key: row}
    order = list(SCENARIOS)
    names = sorted(rows, key=lambda name: (order.index(name), "") if name in order else (len(order), name))
    kept = {name: rows[name] for name in names}
    RESULTS.write_text(json.dumps({"version": 1, "environment": environment(), "rows": kept}, indent=1) + "\n")
