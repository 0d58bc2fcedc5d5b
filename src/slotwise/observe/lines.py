"""Log lines: as text, or as one JSON object each (`--log-format json`)."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from types import TracebackType
from typing import Any

TEXT, JSON = FORMATS = ("text", "json")
FIELDS = "fields"  # attribute of a log record: the fields of a JSON line beside the message


class JsonLines(logging.Formatter):
    """One object per line: `time` (UTC), `level`, `logger`, `message`, the fields of `tell`, perhaps `exception`."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(), "logger": record.name, "message": record.getMessage(),
            **getattr(record, FIELDS, {})}
        if record.exc_info and record.exc_info[0] is not None:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def set_up(log_format: str) -> None:
    """Sends all logging, warnings and uncaught exceptions of this process to stderr, in one format."""
    handler = logging.StreamHandler(sys.stderr)
    if log_format == JSON:
        handler.setFormatter(JsonLines())
        logging.captureWarnings(True)
        sys.excepthook = _last_words
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


def _last_words(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    logging.getLogger("slotwise").critical("the process ends: %s", error, exc_info=(kind, error, trace))


def tell(log: logging.Logger, message: str, fields: Mapping[str, Any]) -> None:
    """Logs a line with `fields` added to its JSON object."""
    log.info(message, extra={FIELDS: dict(fields)})
