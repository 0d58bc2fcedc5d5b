"""Text of logs, servers and clients for a terminal, without markup and control characters; durations for a reader."""

from __future__ import annotations

from rich.text import Text

from slotwise.errors import printable


def plain(text: str, style: str = "") -> Text:
    """Returns `text` for rich: brackets are no markup, and characters that are not printable are escaped."""
    return Text(printable(text), style=style)


def duration(seconds: float) -> str:
    """Returns a duration as a person says it: 84.3 ms, 7.48 s, 12 min 4 s, 2 h 14 min."""
    if seconds < 1:
        return f"{seconds * 1e3:,.1f} ms"
    if seconds < 59.995:
        return f"{seconds:.2f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600:,} h {whole % 3600 // 60} min"
