"""Attacks on real servers, and drills: overload, disconnects, hostile HTTP, lost engines, ranks and replicas.

`make test` runs the short ones; the drills take minutes each and are run by hand, from the root:

    python -m pytest tests/attacks --drills [-k NAME] [--attack-seconds S] [--attack-seed N] [--record]

`--record` writes what was seen to benchmarks/results/, from which the table of docs/reliability.md is made.
"""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def module(name: str) -> list[str]:
    """Returns the command that runs a module of this package in a process of its own."""
    return [sys.executable, "-m", f"attacks.{name}"]


def module_environment() -> dict[str, str]:
    """Returns the environment of such a process."""
    return os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests")))}
