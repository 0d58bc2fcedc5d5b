"""The file of an event log: written on a thread of its own, so that `write` never waits, and read entry by entry.

The file is locked while it is written: one process writes it at a time.
"""

from __future__ import annotations

import fcntl
import logging
import os
import stat
import threading
from collections.abc import Iterable, Iterator
from io import FileIO
from pathlib import Path
from types import TracebackType

from slotwise.errors import OneLineError, described
from slotwise.observe import last_format
from slotwise.observe.event_log import (
    FORMAT,
    LAST_FORMAT,
    MAX_LINE,
    Entry,
    FormatError,
    Gap,
    LogError,
    Run,
    decode,
    decoded,
    entry_of,
    line_of,
)
from slotwise.platform.files import PRIVATE
from slotwise.version import __version__

GATHER = 0.25  # seconds between two writes: fewer and larger ones cost the logging thread less
MAX_WAITING = 32 << 20  # bytes that may wait to be written

MAX_FIRST_LINE = 8 << 20  # bytes: the first entry describes an engine, tiers included

logger = logging.getLogger(__name__)


def read(lines: Iterable[bytes]) -> Iterator[Entry]:
    """Yields the entries in `lines`, without an incomplete last line; those of a log of the last release, adapted.

    Raises:
        FormatError: they have another format.
        LogError: a line is no entry; the message has its number.
    """
    unchecked = entry_of
    for number, line in enumerate(lines, 1):
        if len(line) > MAX_LINE:
            raise LogError(f"line {number}: more than {MAX_LINE} bytes")
        if not line.endswith(b"\n"):
            return
        try:
            entry = decoded(line, unchecked)
        except LogError as error:
            raise type(error)(f"line {number}: {error}") from error
        if isinstance(entry, Run) and entry.format == LAST_FORMAT:
            unchecked = last_format.entry_of
        yield entry


def read_file(path: Path | str) -> Iterator[Entry]:
    """Yields the entries of a file, read lazily.

    Raises:
        FormatError: it has another format.
        LogError: the file cannot be read, or is not an event log, or has lost its beginning.
    """
    try:
        with Path(path).open("rb") as file:
            for index, entry in enumerate(read(iter(lambda: file.readline(MAX_LINE + 1), b""))):
                if index == 0 and not isinstance(entry, Run):
                    raise LogError(f"line 1: the beginning of this event log is missing, and its format with it; "
                                   f"slotwise {__version__} reads format {FORMAT}")
                yield entry
    except OSError as error:
        raise LogError(f"{path}: {error.strerror}") from error


class LogFileError(OneLineError, ValueError):
    """A file that may not become an event log; the message says what to do."""


def check(path: Path | str, *, overwrite: bool = False) -> None:
    """Checks that `path` can become a `LogFile`; keeps its content, or creates an empty file.

    Raises:
        LogFileError, OSError: as `LogFile`.
    """
    os.close(_opened(path, overwrite=overwrite))


def _opened(path: Path | str, *, overwrite: bool) -> int:
    """Returns a descriptor of the file, locked, created or unchanged."""
    # A pipe is refused, not waited for; a file that another program has cut goes on at its new end.
    flags = os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL, PRIVATE)
    except FileExistsError:
        if os.path.islink(path):
            raise LogFileError(f"{path} is a link: name the file itself") from None
        descriptor = os.open(path, flags)
    try:
        if wrong := _objection(descriptor, overwrite=overwrite) or _lock(descriptor):
            raise LogFileError(f"{path} {wrong}")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _objection(descriptor: int, *, overwrite: bool) -> str:
    """Why an existing file must not be replaced; "" if it may be."""
    about = os.fstat(descriptor)
    if not stat.S_ISREG(about.st_mode):
        return "is not a regular file, and cannot become an event log"
    if overwrite:
        return ""
    if about.st_uid != os.geteuid():
        return "belongs to another user, and is not replaced: name another file, or say --overwrite-event-log"
    if about.st_size and not _is_log(os.pread(descriptor, MAX_FIRST_LINE, 0)):
        return "is not an event log, and is not replaced: name another file, or say --overwrite-event-log"
    return ""


def _lock(descriptor: int) -> str:
    """Locks the file until the descriptor is closed.  Returns why it cannot be; "" if it is."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return "is being written by another process: name another file"
    except OSError as error:  # a file system without locks
        logger.warning("the event log cannot be locked against a second process: %s", error)
    return ""


def _is_log(beginning: bytes) -> bool:
    line, end, _ = beginning.partition(b"\n")
    try:
        return bool(end) and isinstance(decode(line), Run)
    except FormatError:
        return True  # of an earlier version
    except LogError:
        return False


class LogFile:
    """A new event log, readable by its owner only; replaces an older log of that name.  A context manager.

    Closing writes all pending lines.  When the file cannot keep up, lines are dropped and a `Gap` counts them.

    Args:
        path: of the file.
        max_waiting: bytes that may wait to be written.
        overwrite: replace any file.

    Raises:
        OSError: the file cannot be created.
        LogFileError: the existing file is not an event log, belongs to another user, or is being written.
    """

    def __init__(self, path: Path | str, max_waiting: int = MAX_WAITING, *, overwrite: bool = False) -> None:
        descriptor = _opened(path, overwrite=overwrite)
        os.fchmod(descriptor, PRIVATE)
        os.ftruncate(descriptor, 0)
        self._file = FileIO(descriptor, "w")
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
        """Writes all pending lines and closes the file."""
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
            logger.error("the event log %s ends here: %s", self._path, described(error))

    def _put(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[self._file.write(rest):]
