"""Anthropic's client for Python."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import anthropic
import pytest
from servers import MAX_TOKENS, MESSAGES, Server

CLIENT = "`anthropic` for Python"
VERSION = version("anthropic")
SETTING = "`base_url` is `http://127.0.0.1:8000`, without `/v1` ([Messages](apis.md#anthropics-messages))."
SYSTEM, *TURNS = MESSAGES
GREEDY = {"max_tokens": MAX_TOKENS, "system": SYSTEM["content"], "messages": TURNS, "extra_body": {"temperature": 0}}
Refused = Callable[[str, object], None]


@pytest.fixture(scope="module")
def client(chat: Server) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=chat.url, api_key=chat.key, max_retries=0)


def test_message(client: anthropic.Anthropic, chat: Server) -> None:
    """Answers a conversation with a system prompt, whole."""
    message = client.messages.create(model=chat.model, **GREEDY)
    assert message.content[0].text == chat.chat() != ""
    assert message.stop_reason in ("end_turn", "max_tokens") and message.usage.output_tokens > 0


def test_stream(client: anthropic.Anthropic, chat: Server) -> None:
    """Answers a conversation as a stream: `messages.stream`."""
    with client.messages.stream(model=chat.model, **GREEDY) as stream:
        assert "".join(stream.text_stream) == chat.chat()
        assert stream.get_final_message().usage.output_tokens > 0


def test_count_tokens(client: anthropic.Anthropic, chat: Server) -> None:
    """Counts the tokens of a prompt."""
    counted = client.messages.count_tokens(model=chat.model, system=SYSTEM["content"], messages=TURNS)
    assert counted.input_tokens == len(chat.post("/tokenize", messages=MESSAGES)["tokens"])


def test_stop_sequence(client: anthropic.Anthropic, chat: Server) -> None:
    """Ends at a stop sequence, and is told which."""
    text = chat.chat()
    stop = text[len(text) // 2 :][:4]
    message = client.messages.create(model=chat.model, stop_sequences=[stop], **GREEDY)
    assert message.stop_reason == "stop_sequence" and message.stop_sequence == stop
    assert message.content[0].text == text[: text.index(stop)]


def test_structured_output(client: anthropic.Anthropic, chat: Server) -> None:
    """Answers with JSON of a schema: `output_config.format`."""
    schema = {"type": "object", "additionalProperties": False, "required": ["kind"],
              "properties": {"kind": {"enum": ["slot", "block"]}}}
    message = client.messages.create(model=chat.model, max_tokens=200, messages=TURNS,
                                     output_config={"format": {"type": "json_schema", "schema": schema}})
    assert json.loads(message.content[0].text)["kind"] in ("slot", "block")


def test_wrong_key(chat: Server) -> None:
    """Is told that its key is wrong, in Anthropic's form."""
    with pytest.raises(anthropic.AuthenticationError):
        anthropic.Anthropic(base_url=chat.url, api_key="wrong", max_retries=0).messages.create(
            model=chat.model, max_tokens=1, messages=TURNS)


def test_too_long(builtin: Server) -> None:
    """Is told in Anthropic's sentences what is too long, the prompt or the output."""
    code = anthropic.Anthropic(base_url=builtin.url, api_key=builtin.key, max_retries=0)
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > \d+ maximum"):
        code.messages.create(model=builtin.model, max_tokens=1, messages=[{"role": "user", "content": "x " * 4096}])
    with pytest.raises(anthropic.BadRequestError, match=r"`max_tokens` exceed context limit: \d+ \+ 8192 > \d+"):
        code.messages.create(model=builtin.model, max_tokens=8192, messages=TURNS)


@pytest.mark.parametrize(("asks", "fields"), [
    ("an image", {"messages": [{"role": "user", "content": [
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}]}]}),
    ("a web search", {"tools": [{"type": "web_search_20250305", "name": "web_search"}], "messages": TURNS}),
], ids=["image", "web_search"])
def test_refused(client: anthropic.Anthropic, chat: Server, asks: str, fields: dict[str, Any],
                 record_property: Refused) -> None:
    """Asks for {asks}."""
    with pytest.raises(anthropic.BadRequestError) as refused:
        client.messages.create(model=chat.model, max_tokens=4, **fields)
    record_property("refused", refused.value.body["error"]["message"])
