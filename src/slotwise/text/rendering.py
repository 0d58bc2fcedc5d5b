"""Chat templates for a worker process (see `server.worker_process`): a template may never end or exhaust memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from slotwise.text.chat_template import ChatTemplate

Special = Sequence[Sequence[str]]  # pairs of a variable's name and its value


@lru_cache(2)  # one may be for tools
def _compiled(source: str, special: tuple[tuple[str, str], ...]) -> ChatTemplate:
    return ChatTemplate(source, dict(special))


def _template(source: str, special: Special) -> ChatTemplate:
    return _compiled(source, tuple([(name, value) for name, value in special]))


def check(source: str, special: Special) -> None:
    """Raises ChatTemplateError for a template that does not compile."""
    _template(source, special)


def ignores_tools(source: str, special: Special) -> bool:
    """See `ChatTemplate.ignores_tools`."""
    return _template(source, special).ignores_tools


def render(source: str, special: Special, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any],
           is_open: bool) -> str:
    """See `ChatTemplate.render`."""
    return _template(source, special).render(messages, is_open, **variables)


def variables(source: str, special: Special) -> list[str]:
    """See `ChatTemplate.variables`."""
    return sorted(_template(source, special).variables())


CALLS = {"check": check, "ignores_tools": ignores_tools, "render": render, "variables": variables}
