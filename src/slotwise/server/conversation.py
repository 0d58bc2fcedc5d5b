"""A conversation of a request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from slotwise.text.conversation import Message, text_of


class Conversation(NamedTuple):
    """Messages, and how they become a prompt."""

    messages: list[Message]
    variables: dict[str, Any]  # of the template
    template: str | None = None  # the request's own source; None: the server's
    continues: bool = False  # the last message is left open


def last_text(messages: Sequence[Message], role: str) -> str:
    """The text of the last message if it is of this role, else ""."""
    return _text(messages[-1]) if messages and messages[-1].get("role") == role else ""


def _text(message: Message) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "\n".join(map(text_of, content))
