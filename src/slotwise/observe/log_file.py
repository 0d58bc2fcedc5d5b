"""An event log on its way into a file, written by a thread of its own: whoever logs is never kept waiting."""

from __future__ import annotations

import logging
import threading
from io import FileIO
from pathlib import Path
from types import TracebackType

from slotwise.observe.log import Gap, line_of

GATHER = 0.25  # seconds between two writes: fewer and larger ones take less from whoever logs
MAX_WAITING = 32 << 20  # bytes that may wait to be written

logger = logging.getLogger(__name__)


class LogFile:
    """A new event log; what was under its name is replaced.  A context manager: at its end all that waits is written.

    Where the file cannot keep up, lines are left out, and a `Gap` says how many.

    Args:
        path: of the file.
        max_waiting: bytes that may wait to be written.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, path: Path | str, max_waiting: int = MAX_WAITING) -> None:
        self._file = FileIO(path, "w")
        self._path = path
        self._max_waiting = max_waiting
        self._lock = threading.Lock()
        self._waiting: list[bytes] = []
        self._size = 0
        self._missed = 0
        self._news = threading.Event()
        self._closing = threading.Event()
        self._broken = False
        self._thread = threading.Thread(target=self._write_on, name="event-log", daemon=True)
        self._thread.start()

    def __enter__(self) -> LogFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None,
                 ) -> None:
        self.close()

    def write(self, line: bytes) -> None:
        """Never waits."""
        with self._lock:
            if self._waiting and (self._missed or self._size + len(line) > self._max_waiting):
                self._missed += 1
                return
            if self._missed:
                self._waiting.append(line_of(Gap(self._missed)))
                self._missed = 0
            self._waiting.append(line)
            self._size += len(line)
        if not self._news.is_set():
            self._news.set()

    def close(self) -> None:
        """Write what waits, and end."""
        self._closing.set()
        self._news.set()
        self._thread.join()
        self._file.close()

    def _write_on(self) -> None:
        while not self._closing.is_set():
            self._news.wait()
            self._closing.wait(GATHER)
            self._news.clear()
            self._write_waiting()
        self._write_waiting()

    def _write_waiting(self) -> None:
        with self._lock:
            lines, self._waiting, self._size = self._waiting, [], 0
            if self._closing.is_set() and self._missed:
                lines.append(line_of(Gap(self._missed)))
                self._missed = 0
        if not lines or self._broken:
            return
        try:
            self._put(b"".join(lines))
        except OSError as error:
            self._broken = True
            logger.error("the event log %s ends here: %s", self._path, error)

    def _put(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[self._file.write(rest):]
