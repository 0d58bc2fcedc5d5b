"""Checks and measures everything on a GPU in eight minutes, and writes one JSON file: `make gpu-check`.

    PYTHONPATH=src python -m benchmarks.gpu                  all of it, gpu-check.json
    PYTHONPATH=src python -m benchmarks.gpu --rehearse       all of it in small, on the CPU: tests that it runs
    PYTHONPATH=src python -m benchmarks.gpu --parts steps    one part
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.figures import judged
from benchmarks.gpu.parts import OK, PARTS, SKIPPED, run

SECONDS = 480.0  # for all of it
COMPLETED = "completed"


def main() -> int:
    """Returns 0 on success or without a GPU, else 1; a missed target is reported, and no failure."""
    asked = _parse()
    missing = "" if asked.rehearse else _why_not()
    if missing:
        print(f"skipped: {missing}", flush=True)
        _write(asked.output, {"status": SKIPPED, "why": missing})
        return 0
    from benchmarks.gpu.machine import facts

    environment = facts()
    environment["commit"] = asked.commit or environment["commit"]
    result = _begun(asked, environment)
    started = time.monotonic()
    for part in PARTS:
        if asked.parts and part.name not in asked.parts:
            continue
        if result["parts"].get(part.name, {}).get("status") == OK:
            print(f"{part.name}: {OK} already", flush=True)
            continue
        left = asked.seconds - (time.monotonic() - started)
        result["parts"][part.name] = done = run(part, rehearse=asked.rehearse, time_left=left)
        _write(asked.output, result)  # a machine that is lost loses one part
        print(f"{part.name}: {done['status']} after {done.get('seconds', 0)} s", flush=True)
    failed = [name for name, done in result["parts"].items() if done["status"] != OK]
    result |= {"status": f"not complete: {', '.join(failed)}" if failed else COMPLETED,
               "seconds": round(time.monotonic() - started, 1),
               "targets": [] if asked.rehearse else judged(result["parts"])}
    _write(asked.output, result)
    _report(result)
    return int(bool(failed))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("gpu-check.json"), help="(default: gpu-check.json)")
    parser.add_argument("--rehearse", action="store_true", help="everything tiny, on the CPU")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"for all of it (default: {SECONDS:g})")
    parser.add_argument("--fresh", action="store_true", help="begin anew; else an unfinished check goes on")
    parser.add_argument("--parts", nargs="+", choices=[part.name for part in PARTS], help="only these")
    parser.add_argument("--commit", default="", help="what is checked, where git cannot tell")
    return parser.parse_args()


def _begun(asked: argparse.Namespace, environment: dict[str, Any]) -> dict[str, Any]:
    """The results so far of the same check on the same machine, unless it was completed; else none."""
    fresh = {"status": "running", "rehearsal": asked.rehearse, "environment": environment, "parts": {}}
    if asked.fresh or not asked.output.exists():
        return fresh
    try:
        before = json.loads(asked.output.read_text())
    except ValueError:
        return fresh
    same = _identity(before.get("environment", {})) == _identity(json.loads(json.dumps(environment)))
    goes_on = same and before.get("rehearsal") == asked.rehearse and before.get("status") != COMPLETED
    return {**fresh, "parts": before["parts"]} if goes_on else fresh


def _identity(environment: dict[str, Any]) -> dict[str, Any]:
    """What must be the same for results to belong together: all but the time."""
    return {name: value for name, value in environment.items() if name != "created"}


def _why_not() -> str:
    """Returns what is missing for a check on a GPU; empty when nothing is."""
    for package in ("torch", "triton"):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed"
    import torch

    return "" if torch.cuda.is_available() else f"torch {torch.__version__} sees no GPU"


def _write(path: Path, result: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".part")  # so that a kill leaves the old results or the new ones
    beside.write_text(json.dumps(result, indent=1) + "\n")
    beside.replace(path)


def _report(result: dict[str, Any]) -> None:
    for name, done in result["parts"].items():
        if "said" in done:
            print(f"\n{name} said last:\n{done['said']}")
    if found := result["parts"].get("shares", {}).get("figures", {}).get("shares"):
        print(f"\n{'kernel':28} {'predicted us':>13} {'measured us':>13}")
        for name, figures in found.items():
            print(f"{name:28} {figures['expected'] * 1e6:13,.0f} {figures['seconds'] * 1e6:13,.0f}")
    if graphs := result["parts"].get("start", {}).get("figures", {}).get("graphs"):
        predicted, measured = (graphs[f"{which}_bytes"] / 2**20 for which in ("predicted", "measured"))
        print(f"\n{graphs['captured']} graphs: predicted {predicted:,.1f} MiB, measured {measured:,.1f} MiB")
    print(f"\n{result['status']} after {result['seconds']} s")
    for target in result["targets"]:
        found = "not measured" if target["found"] is None else f"{target['found']:.3g}"
        verdict = "" if target["met"] is None else " (met)" if target["met"] else " (MISSED)"
        print(f"  {target['name']}: {found}, wanted {target['wanted']}{verdict}")


if __name__ == "__main__":
    sys.exit(main())
