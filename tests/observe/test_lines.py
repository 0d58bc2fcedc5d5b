from __future__ import annotations

import json
import subprocess
import sys

import pytest

PROGRAM = """
import logging, warnings
from slotwise.observe import lines
lines.set_up({format!r})
lines.tell(logging.getLogger("a.b"), "three things: é\\nand a second line", {{"slots": 3, "share": 0.5, "none": None}})
logging.getLogger("a").debug("nobody wants this")
warnings.warn("careful")
try:
    1 / 0
except ZeroDivisionError:
    logging.getLogger("c").exception("it failed %d times", 2)
raise SystemError("the end")
"""


def said(log_format: str) -> str:
    run = subprocess.run([sys.executable, "-c", PROGRAM.format(format=log_format)], capture_output=True, text=True)
    assert run.returncode == 1 and not run.stdout
    return run.stderr


def test_every_line_is_one_object_whatever_is_said() -> None:
    told, warned, failed, last = map(json.loads, said("json").splitlines())
    assert told.pop("time").endswith("+00:00")
    assert told == {"level": "info", "logger": "a.b", "message": "three things: é\nand a second line", "slots": 3,
                    "share": 0.5, "none": None}
    assert warned["level"] == "warning" and "careful" in warned["message"]
    assert failed["message"] == "it failed 2 times" and "ZeroDivisionError" in failed["exception"]
    assert last["level"] == "critical" and "SystemError: the end" in last["exception"]


@pytest.mark.parametrize("part", ["INFO three things: é\nand a second line\n", "ERROR it failed 2 times\nTraceback"])
def test_lines_for_people(part: str) -> None:
    assert part in said("text") and "nobody" not in said("text")
