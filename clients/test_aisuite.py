"""aisuite: its provider `openai` with a base URL."""

from __future__ import annotations

from importlib.metadata import version

import aisuite
import pytest
from servers import MAX_TOKENS, MESSAGES, Server

CLIENT = "`aisuite`"
VERSION = version("aisuite")
SETTING = "`base_url` is `http://127.0.0.1:8000/v1`, and any `api_key` if the server has none."


@pytest.fixture(scope="module")
def client(chat: Server) -> aisuite.Client:
    return aisuite.Client({"openai": {"base_url": chat.base_url, "api_key": chat.key}})


def test_chat(client: aisuite.Client, chat: Server) -> None:
    """Answers a conversation."""
    answer = client.chat.completions.create(
        model=f"openai:{chat.model}", messages=MESSAGES, temperature=0, max_tokens=MAX_TOKENS)
    assert answer.choices[0].message.content == chat.chat()


def test_stream(client: aisuite.Client, chat: Server) -> None:
    """Answers a conversation as a stream."""
    chunks = client.chat.completions.create(
        model=f"openai:{chat.model}", messages=MESSAGES, temperature=0, max_tokens=MAX_TOKENS, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == chat.chat()
