"""usage: python -m benchmarks.reliability [--only NAME] [--seconds S] [--seed N] [--patience F] [--no-record]

Run it in the repository's root.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from slotwise.bench.results import environment

from . import attacked, besieged, engines, leaving, ledger, overload, pressure, shapes

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "reliability-cpu.json"

SCENARIOS: dict[str, Callable[[float], ledger.Row]] = {
    "overload": overload.overload, "disconnects": leaving.disconnects, "impossible": pressure.impossible,
    "small-pool": pressure.small_pool, "kill": engines.killed, "frozen": engines.frozen, "sigterm": leaving.sigterm,
}


def faults(seconds: float, seed: int, patience: float) -> ledger.Row:
    row, journal = attacked.random_faults(seconds, seed, patience)
    print(f"    all actions and violations: {attacked.keep_log(journal)}", flush=True)
    return row


ATTACKS: dict[str, Callable[[float, int], ledger.Row]] = {  # each takes seconds and seed
    "hostile": besieged.hostile, "slow": besieged.slow_clients, "shapes": shapes.shapes}


def record(rows: dict[str, dict]) -> None:
    """Writes results beside those of scenarios that did not run."""
    kept = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else {}
    merged = kept | rows
    merged = {name: merged[name] for name in sorted(merged, key=_place)}
    RESULTS.write_text(json.dumps({"version": 1, "environment": environment(), "rows": merged}, indent=1) + "\n")


def _place(name: str) -> tuple[int, str]:
    """Returns the sort key of a row in the table: the scenarios in their order, then attacks."""
    known = list(SCENARIOS)
    return (known.index(name), "") if name in known else (len(known), name)


def main() -> int:
    parser = argparse.ArgumentParser(description="What a real server does under pressure.")
    parser.add_argument("--only", action="append", choices=[*SCENARIOS, *ATTACKS, "faults"],
                        help="one scenario; may be given again")
    parser.add_argument("--seconds", type=float, default=120.0, help="of the overload, and of attacks (default: 120)")
    parser.add_argument("--seed", type=int, default=1, help="of attacks (default: 1)")
    parser.add_argument("--patience", type=float, default=1.0, help="factor of the time limits of faults, for a "
                        "machine with other work; above 1 a stream's gaps are not judged (default: 1)")
    parser.add_argument("--no-record", action="store_true", help="leave the results as they are")
    asked = parser.parse_args()
    names = asked.only or [*SCENARIOS, *ATTACKS, "faults"]
    attacks = ATTACKS | {"faults": partial(faults, patience=asked.patience)}
    rows = {}
    for name in names:
        print(f"{name} ...", flush=True)
        began = time.perf_counter()
        if name in attacks:
            row, key = attacks[name](asked.seconds, asked.seed).as_json(), f"{name}-{asked.seconds:g}s-seed{asked.seed}"
        else:
            row, key = SCENARIOS[name](asked.seconds).as_json(), name
        took = {"seconds": time.perf_counter() - began, "commit": environment()["commit"]}
        rows[key] = {"name": name} | row | took
        print(ledger.table([rows[key]]).splitlines()[-1], f"\n    {rows[key]['seconds']:.0f} s", flush=True)
        if not asked.no_record:
            record(rows)
    return 1 if any(row["broken"] for row in rows.values()) else 0


if __name__ == "__main__":
    raise SystemExit(main())
