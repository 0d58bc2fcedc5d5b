"""Commands whose standard streams are closed, as by a supervisor."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import os, sys
sys.argv = ["slotwise"]
import slotwise.cli
found = [os.readlink(f"/proc/self/fd/{number}") == os.devnull and os.get_inheritable(number) for number in range(3)]
print("unread", file=sys.stdout), print("unread", file=sys.stderr)
ended = sys.stdin.read() == "" if found[0] else True
os.write(WRITING, repr((found, ended)).encode())
"""


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2), ()])
def test_a_closed_stream_is_the_null_device(closed: tuple[int, ...]) -> None:
    reading, writing = os.pipe()
    shell = f'exec "$0" -c "$1" {" ".join(f"{number}>&-" for number in closed)}'
    script = SCRIPT.replace("WRITING", str(writing))
    with subprocess.Popen(["bash", "-c", shell, sys.executable, script], pass_fds=[writing],
                          stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        os.close(writing)
        process.communicate(timeout=120)
    with open(reading) as told:
        assert told.read() == repr(([number in closed for number in range(3)], True))
