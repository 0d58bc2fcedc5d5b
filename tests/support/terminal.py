"""A command in the foreground of a terminal of its own, as a person has it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping
from typing import Any

NARROW = 60  # columns
CONTROLS = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07]*\x07|[()][A-Z0-9]|[=>])")


class Terminal:
    """Args: arguments: of `slotwise`.  environment: beside that of the tests."""

    def __init__(self, *arguments: str, columns: int = NARROW, environment: Mapping[str, str] = {}) -> None:
        self._ours, self._theirs = pty.openpty()
        fcntl.ioctl(self._theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.before = self.settings
        self.is_smart = environment.get("TERM") != "dumb"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "slotwise.cli", *arguments], stdin=self._theirs, stdout=self._theirs,
            stderr=self._theirs, start_new_session=True, env=os.environ | {"TERM": "xterm-256color", **environment},
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0))
        self.text = ""

    @property
    def settings(self) -> list[Any]:
        return termios.tcgetattr(self._theirs)

    @property
    def reads_lines(self) -> bool:
        return bool(self.settings[3] & termios.ICANON and self.settings[3] & termios.ECHO)

    @property
    def shown(self) -> str:
        """What was written since the last `answers`, without control sequences."""
        return CONTROLS.sub("", self.text).replace("\r", "")

    def press(self, keys: bytes) -> None:
        os.write(self._ours, keys)

    def read(self, wanted: str = "", seconds: float = 240) -> None:
        """Reads until `wanted` was written, which may take as long as kernels to compile; without it, what is there."""
        ends = time.monotonic() + seconds
        while not wanted or (wanted not in self.text and wanted not in self.shown):
            if not select.select([self._ours], [], [], 0.1)[0]:
                if not wanted:
                    return
                assert time.monotonic() < ends and self.process.poll() is None, f"never: {wanted}\n{self.text}"
                continue
            self.read_more()

    def read_more(self) -> None:
        """Reads what comes next."""
        self.text += os.read(self._ours, 65_536).decode(errors="replace")

    def answers(self, keys: bytes, wanted: str) -> str:
        """Presses keys, and returns what is shown from then until `wanted` was."""
        self.read()
        self.text = ""
        self.press(keys)
        self.read(wanted)
        return self.shown

    def ended(self) -> int:
        """The exit status; what is written meanwhile is read, or the process would wait for it."""
        ends = time.monotonic() + 120
        while self.process.poll() is None:
            assert time.monotonic() < ends, self.text
            self.read()
        self.read()
        return self.process.returncode

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for end in (self._ours, self._theirs):
            os.close(end)
