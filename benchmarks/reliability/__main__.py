"""usage: python -m benchmarks.reliability [--only NAME] [--seconds S] [--no-record], from the repository's root."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

from slotwise.bench.results import environment

from . import engines, leaving, ledger, overload, pressure

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "reliability-cpu.json"
PAGE = ROOT / "docs" / "reliability.md"

SCENARIOS: dict[str, Callable[[float], ledger.Row]] = {
    "overload": overload.overload, "disconnects": leaving.disconnects, "impossible": pressure.impossible,
    "small-pool": pressure.small_pool, "kill": engines.killed, "frozen": engines.frozen, "sigterm": leaving.sigterm,
}


def record(names: list[str], rows: dict[str, dict]) -> None:
    """Keep results beside those of scenarios that did not run, and write the page's table anew."""
    kept = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else {}
    merged = {name: (kept | rows)[name] for name in SCENARIOS if name in kept or name in rows}
    RESULTS.write_text(json.dumps({"version": 1, "environment": environment(), "rows": merged}, indent=1) + "\n")
    PAGE.write_text(ledger.refreshed(PAGE.read_text(), ledger.table(merged.values())))


def main() -> int:
    parser = argparse.ArgumentParser(description="What a real server does under pressure.")
    parser.add_argument("--only", action="append", choices=SCENARIOS, help="one scenario; may be given again")
    parser.add_argument("--seconds", type=float, default=120.0, help="of the overload (default: 120)")
    parser.add_argument("--no-record", action="store_true", help="leave results and page as they are")
    asked = parser.parse_args()
    names = asked.only or list(SCENARIOS)
    rows = {}
    for name in names:
        print(f"{name} ...", flush=True)
        began = time.perf_counter()
        row = SCENARIOS[name](asked.seconds).as_json()
        took = {"seconds": time.perf_counter() - began, "commit": environment()["commit"]}
        rows[name] = {"name": name} | row | took
        print(ledger.table([rows[name]]).splitlines()[-1], f"\n    {rows[name]['seconds']:.0f} s", flush=True)
        if not asked.no_record:
            record(names, rows)
    return 1 if any(row["broken"] for row in rows.values()) else 0


if __name__ == "__main__":
    raise SystemExit(main())
