"""Haystack's `OpenAIChatGenerator`, over `/v1/chat/completions`."""

from __future__ import annotations

import json

from environments import Calls, Environment
from servers import Server

INSTALLED = Environment("haystack", "haystack-ai")
CLIENT = "Haystack (`haystack-ai`)"
VERSION = INSTALLED.version
SETTING = '`OpenAIChatGenerator(model=NAME, api_base_url="http://127.0.0.1:8000/v1", api_key=Secret.from_token(...))`.'
MESSAGES = [{"role": "user", "content": "What is the capital of Japan?"}]

pytestmark = INSTALLED.needed


def test_pipeline(calls: Calls, smol: Server) -> None:
    """A pipeline of a prompt's template and the generator answers what plain HTTP answers, with the token counts."""
    result = calls["pipeline"]
    assert result["text"] == smol.chat(MESSAGES, 48) and "Tokyo" in result["text"]
    assert result["finish"] == "stop"
    assert result["usage"]["prompt_tokens"] == len(smol.post("/tokenize", messages=MESSAGES)["tokens"])


def test_stream(calls: Calls) -> None:
    """`streaming_callback` has the same answer in several pieces."""
    result, whole = calls["stream"], calls["pipeline"]
    assert len(result["pieces"]) > 2 and "".join(result["pieces"]) == result["text"] == whole["text"]
    assert result["finish"] == whole["finish"]


def test_agent(calls: Calls) -> None:
    """An `Agent` whose model must call a tool executes it with the model's argument and ends with its result."""
    result = calls["agent"]
    assert result["ran"] == ["Paris"] and result["result"] == "The weather in Paris is sunny, 18 degrees."
    assert result["error"] is False


def test_structured_output(calls: Calls) -> None:
    """`response_format` with a JSON schema: the answer is one of the allowed values."""
    assert json.loads(calls["structured"])["continent"] in ("Europe", "Asia", "Africa")


def test_wrong_key(calls: Calls) -> None:
    """A wrong key is an `AuthenticationError` with the server's message."""
    assert "key" in calls["wrong_key"]
