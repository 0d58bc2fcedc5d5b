"""Text of logs, servers and clients for a terminal: shown as it is, without markup and control characters."""

from __future__ import annotations

from rich.text import Text

from slotwise.errors import printable


def plain(text: str, style: str = "") -> Text:
    """Returns `text` for rich: brackets are no markup, and characters that are not printable are escaped."""
    return Text(printable(text), style=style)
