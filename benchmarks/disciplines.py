"""Measures the figures of docs/batching.md: every discipline on one workload, and the sweeps that change the gain.

usage: python benchmarks/disciplines.py RESULTS [--model FOLDER] [-- MORE OPTIONS OF slotwise compare]
Runs `slotwise compare`, writes its JSON as RESULTS.json and its page as RESULTS.html, and with --pictures FOLDER the
slot charts, one SVG per discipline.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from slotwise.bench.report.comparison_page import slot_charts


def compare(results: Path, options: list[str]) -> dict:
    """Returns the result of one comparison; its table goes to the terminal."""
    kept = results.with_suffix(".json")
    command = [sys.executable, "-m", "slotwise.cli", "compare", "--json", str(kept),
               "--output", str(results.with_suffix(".html")), *options]
    subprocess.run(command, check=True)
    return json.loads(kept.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, help="where to write, without a suffix")
    parser.add_argument("--pictures", type=Path, help="a folder for the slot charts")
    asked, options = parser.parse_known_args()
    result = compare(asked.results, [option for option in options if option != "--"])
    if asked.pictures:
        for label, picture in slot_charts(result).items():
            (asked.pictures / f"batching_{label.replace(' ', '_').lower()}.svg").write_text(picture)


if __name__ == "__main__":
    main()
