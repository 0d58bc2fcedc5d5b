"""Log lines: as text, or as one JSON object each (`--log-format json`).

All that a process of Slotwise says on stderr has one form: its own lines and those of libraries, warnings, and
exceptions that nothing handles, in any thread.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections.abc import Mapping
from datetime import UTC, datetime
from types import TracebackType
from typing import Any

from slotwise.errors import printable

TEXT, JSON = FORMATS = ("text", "json")
FIELDS = "fields"  # attribute of a log record: the fields of a JSON line in addition to the message
INDENT = "    "  # of what follows the first line of a text
_chosen = TEXT


class TextLines(logging.Formatter):
    """Time, level and message.  Further lines, of a traceback for instance, are indented; nothing is unprintable."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        return f"\n{INDENT}".join(map(printable, super().format(record).splitlines()))


class JsonLines(logging.Formatter):
    """One object per line: `time` (UTC), `level`, `logger`, `message`, the fields of `tell`, perhaps `exception`."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(), "logger": record.name, "message": record.getMessage(),
            **getattr(record, FIELDS, {})}
        if record.exc_info and record.exc_info[0] is not None:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def set_up(log_format: str) -> None:
    """Sends all logging, warnings and unhandled exceptions of this process to stderr, in one format."""
    global _chosen
    _chosen = log_format
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if log_format == JSON else TextLines())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.captureWarnings(capture=True)
    sys.excepthook = _last_words
    threading.excepthook = _of_thread
    sys.unraisablehook = _of_destructor


def chosen() -> str:
    """Returns the format of this process, for its children."""
    return _chosen


def final(log_format: str, message: str) -> str:
    """Returns the line of a command that ends with `message`: as text, the message alone."""
    if log_format != JSON:
        return message
    return JsonLines().format(logging.makeLogRecord({"name": "slotwise", "levelname": "CRITICAL", "msg": message}))


def _last_words(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    logging.getLogger("slotwise").critical("the process ends: %s", error, exc_info=(kind, error, trace))


def _of_thread(failure: threading.ExceptHookArgs) -> None:
    if failure.exc_value is not None and not isinstance(failure.exc_value, SystemExit):
        name = failure.thread.name if failure.thread is not None else "?"
        logging.getLogger("slotwise").error("the thread %s ends: %s", name, failure.exc_value, exc_info=(
            failure.exc_type, failure.exc_value, failure.exc_traceback))


def _of_destructor(failure: Any) -> None:
    logging.getLogger("slotwise").error("%s %r: %s", failure.err_msg or "nothing handles an exception in",
                                        failure.object, failure.exc_value, exc_info=failure.exc_value)


def tell(log: logging.Logger, message: str, fields: Mapping[str, Any]) -> None:
    """Logs a line with `fields` added to its JSON object."""
    log.info(message, extra={FIELDS: dict(fields)})
