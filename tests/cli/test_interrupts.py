"""Ctrl-C while a command loads: one plain line and 130, whatever it was doing, and no process is left."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slotwise import cli
from slotwise.platform import spawn

FIRST_DELAY, LONGER = 0.05, 1.4  # seconds, and times: imports, the engine's start, the template's worker
COMMANDS = {"serve": ["serve", "--port", "0"], "generate": ["generate", "--max-tokens", "1", "def"]}
START = Path(cli.__file__)


def interrupted(arguments: list[str], delay: float) -> subprocess.CompletedProcess[str]:
    """A command in a process group of its own, which gets SIGINT after `delay` seconds, as from a terminal."""
    process = subprocess.Popen([sys.executable, "-m", "slotwise.cli", *arguments], stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True, start_new_session=True)
    time.sleep(delay)
    os.killpg(process.pid, signal.SIGINT)
    out, errors = process.communicate(timeout=120)  # ends when the last process that has our pipes has ended
    return subprocess.CompletedProcess(arguments, process.returncode, out, errors)


def is_early(errors: str) -> bool:
    """Whether Python itself was still starting, or was at the few lines before ours that handle interrupts."""
    (handled,) = [number for number, line in enumerate(START.read_text().splitlines(), 1) if "end_at_once()" in line]
    has_trace = "Traceback" in errors or not errors
    return has_trace and all(int(line) < handled for line in re.findall(r'cli/__init__.py", line (\d+)', errors))


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_an_interrupt_while_loading_is_one_line(command: str) -> None:
    """At one moment after another, until the command has loaded before it is interrupted."""
    seen, delay = 0, FIRST_DELAY
    while not (done := interrupted(COMMANDS[command], delay)).stdout:
        if done.returncode in (0, 130) or not is_early(done.stderr):
            assert (done.returncode, done.stderr) == (130, f"slotwise {command}: interrupted\n"), delay
            seen += 1
        delay *= LONGER
    assert seen, "every delay was too short or too long"


PROGRAM = """
import os, signal, sys, time
from slotwise.platform import spawn
from slotwise.cli import process as of_command
signal.signal(signal.SIGINT, signal.default_int_handler)
process = spawn.start([sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"])
with of_command.ending_at_once():
    print(process.pid, flush=True)
    time.sleep(600)
"""


def test_children_are_told_nothing_and_end_with_the_command() -> None:
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          start_new_session=True) as process:
        assert process.stdout is not None and process.stderr is not None
        told = {process.stdout.readline().strip(), process.stdout.readline().strip()} - {"up"}
        os.kill(int(told.pop()), signal.SIGINT)
        assert process.poll() is None
        os.kill(process.pid, signal.SIGINT)
        assert process.stdout.read() == "", "the child has ended, too"
        assert process.stderr.read() == "slotwise: interrupted\n" and process.wait(120) == 130


WANTS = """
import time
from slotwise.platform import spawn
spawn.end_on_interrupt()
print("up", flush=True)
time.sleep(600)
"""


def test_a_child_that_wants_it_ends_without_a_word() -> None:
    process = spawn.start([sys.executable, "-c", WANTS], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with process:
        assert process.stdout is not None and process.stderr is not None and process.stdout.readline() == b"up\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == -signal.SIGINT and process.stderr.read() == b""


DISCARDED = """
import os, signal, sys
from slotwise.cli import process as of_command
signal.signal(signal.SIGINT, signal.default_int_handler)
with of_command.ending_at_once():
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    os.kill(os.getpid(), signal.SIGINT)
"""


FORMED = """
import functools, os, signal
from slotwise.cli import process as of_command
from slotwise.observe.lines import final
signal.signal(signal.SIGINT, signal.default_int_handler)
with of_command.ending_at_once(functools.partial(final, "json")):
    with of_command.ending_at_once():
        pass
    os.kill(os.getpid(), signal.SIGINT)
"""


def test_the_line_has_the_form_of_the_log() -> None:
    """Also after another context within the first."""
    done = subprocess.run([sys.executable, "-c", FORMED], capture_output=True, text=True)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 130 and json.loads(line)["message"] == "slotwise: interrupted"


def test_the_line_is_written_also_while_stderr_is_discarded() -> None:
    """As a library's panics are, while a tokenizer loads."""
    done = subprocess.run([sys.executable, "-c", DISCARDED], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (130, "slotwise: interrupted\n")


PARENT = """
import subprocess, sys
from slotwise.platform import spawn
child = ("from slotwise.platform import spawn; spawn.end_with_parent(); print('up', flush=True); "
         "import time; time.sleep(600)")
spawn.start([sys.executable, "-c", child]).wait()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells children that their parent has ended")
def test_a_child_may_end_with_its_parent() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        process.kill()
        assert process.stdout.read() == b"", "the child has ended, too"


def test_the_handler_before_is_back_afterwards() -> None:
    from slotwise.cli import process as of_command

    before = signal.getsignal(signal.SIGINT)
    with of_command.ending_at_once():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with of_command.ending_at_once():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN, "as under nohup"
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_child_has_interrupts_blocked_from_its_start() -> None:
    process = spawn.start([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        (mask,) = [line for line in Path(f"/proc/{process.pid}/status").read_text().splitlines() if "SigBlk" in line]
        assert int(mask.split()[1], 16) & 1 << (signal.SIGINT - 1)
        assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    finally:
        process.kill()
        process.communicate()
