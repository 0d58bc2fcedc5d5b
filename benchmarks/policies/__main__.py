"""Measures the promises of the scheduling policies, on real servers or on a virtual clock.

usage: python -m benchmarks.policies [--only NAME] [--simulated | --model FOLDER] [--trace FILE] [--no-record]

--trace is the Azure conversation trace of 2023 as CSV (arrived_at, num_prefill_tokens, num_decode_tokens); without it
lengths are drawn from its quantiles, prompts and outputs independently, so that `shortest` learns nothing from prompts.
"""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path

from benchmarks.commands import parser_of

from slotwise.measure.bench.results import environment

from . import charts
from .runs import FAILURES, RUNS, Finding, Where
from .worlds import real, simulated

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "policies-cpu.json"
PICTURES = ROOT / "docs" / "pictures"
GAP = "gap between two tokens of a stream"
MEASURED = {"giants": GAP, "shortest": "time to the whole answer"}
FIRST_TOKEN = "time to the first token"


def record(world: str, name: str, findings: list[Finding], facts: dict[str, object]) -> None:
    """Writes figures beside those of other runs, and draws their curves."""
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"version": 1, "simulated": {}, "real": {}}
    kept.setdefault(world, {})[name] = facts | {
        "environment": environment(), "findings": [found.as_json() for found in findings]}
    RESULTS.write_text(json.dumps(kept, indent=1) + "\n")
    for number, found in enumerate(findings):
        title = f"{found.promise.partition(':')[0] if len(findings) > 1 else name}, {world}"
        path = PICTURES / f"policy_{name}_{world.replace(' ', '_')}{number or ''}.svg"
        path.write_text(charts.chart(title, MEASURED.get(name, FIRST_TOKEN), found.curves))


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--only", action="append", choices=RUNS | FAILURES, help="one run; may be given again")
    parser.add_argument("--simulated", action="store_true", help="on a virtual clock, in seconds")
    parser.add_argument("--trace", type=Path, help="the Azure conversation trace, CSV")
    parser.add_argument("--seconds", type=float, default=20.0, help="of arrivals in each run")
    parser.add_argument("--workload", action="append", choices=("azure", "bursty"), help="one of the two")
    parser.add_argument("--model", default="", help="a checkpoint's folder")
    parser.add_argument("--seed", type=int, default=1, help="of what is drawn")
    parser.add_argument("--turns", type=int, default=0, help="of what runs in turns")
    parser.add_argument("--no-record", action="store_true", help="leave results and pictures as they are")
    asked = parser.parse_args()
    where = Where(simulated if asked.simulated else partial(real, model=asked.model), asked.trace, asked.seconds,
                  tuple(asked.workload or ("azure", "bursty")), asked.seed,
                  asked.turns or (1 if asked.simulated else 3))
    world = "simulated" if asked.simulated else f"real {Path(asked.model).name}".strip()
    broken = 0
    for name in asked.only or (RUNS | FAILURES if asked.simulated else RUNS):
        began = time.perf_counter()
        findings = (RUNS | FAILURES)[name](where)
        facts = {"trace": asked.trace.name if asked.trace else None, "seed": asked.seed, "seconds": asked.seconds,
                 "turns": where.turns, "took": round(time.perf_counter() - began, 1)}
        for found in findings:
            broken += not found.holds
            print(f"{name}: {'holds' if found.holds else 'BROKEN'}: {found.promise}\n    "
                  + ", ".join(f"{key} {value:.4g}" for key, value in found.figures.items()), flush=True)
        if not asked.no_record:
            record(world, name, findings, facts)
    return 1 if broken else 0


if __name__ == "__main__":
    raise SystemExit(main())
