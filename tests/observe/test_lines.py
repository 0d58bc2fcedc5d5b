from __future__ import annotations

import json
import re
import subprocess
import sys

PROGRAM = """
import logging, threading, warnings
from slotwise.observe import lines
lines.set_up({format!r})
lines.tell(logging.getLogger("a.b"), "three things: é\\nand a second line \\x1b[31m",
           {{"slots": 3, "share": 0.5, "none": None}})
logging.getLogger("a").debug("nobody wants this")
warnings.warn("careful")
try:
    1 / 0
except ZeroDivisionError:
    logging.getLogger("c").exception("it failed %d times", 2)
def fail(*_):
    raise ValueError("in a thread" if not _ else "in a destructor")
thread = threading.Thread(target=fail, name="worker")
thread.start()
thread.join()
type("Thing", (), {{"__del__": fail}})()
raise SystemError("the end")
"""
RECORD = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} ([A-Z]+) (?=\S)", re.MULTILINE)


def said(log_format: str) -> str:
    run = subprocess.run([sys.executable, "-c", PROGRAM.format(format=log_format)], capture_output=True, text=True)
    assert run.returncode == 1 and not run.stdout
    return run.stderr


def test_every_line_is_one_object_whatever_is_said() -> None:
    told, warned, failed, thread, forgotten, last = map(json.loads, said("json").splitlines())
    assert told.pop("time").endswith("+00:00")
    assert told == {"level": "info", "logger": "a.b", "message": "three things: é\nand a second line \x1b[31m",
                    "slots": 3, "share": 0.5, "none": None}
    assert warned["level"] == "warning" and "careful" in warned["message"]
    assert failed["message"] == "it failed 2 times" and "ZeroDivisionError" in failed["exception"]
    assert thread["message"] == "the thread worker ends: in a thread" and "ValueError" in thread["exception"]
    assert forgotten["level"] == "error" and "in a destructor" in forgotten["exception"]
    assert last["level"] == "critical" and "SystemError: the end" in last["exception"]


def test_lines_for_people() -> None:
    """Each record has its time and level; what follows its first line is indented, and nothing is unprintable."""
    records = RECORD.split(said("text"))
    assert records[0] == ""
    told, warned, failed, thread, forgotten, last = zip(records[1::2], records[2::2], strict=True)
    assert told == ("INFO", "three things: é\n    and a second line \\x1b[31m\n")
    assert warned[0] == "WARNING" and "careful" in warned[1] and failed[0] == "ERROR"
    assert failed[1].startswith("it failed 2 times\n    Traceback (most recent call last):\n")
    assert thread[0] == "ERROR" and thread[1].startswith("the thread worker ends: in a thread\n    Traceback")
    assert forgotten[0] == "ERROR" and "in a destructor" in forgotten[1]
    assert last[0] == "CRITICAL" and "    SystemError: the end" in last[1]
    assert "nobody" not in said("text")
