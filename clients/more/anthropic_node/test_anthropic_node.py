"""Anthropic's client for Node, over `/v1/messages`."""

from __future__ import annotations

from environments import Calls, Environment
from servers import Server

INSTALLED = Environment("anthropic_node", "@anthropic-ai/sdk")
CLIENT = "`@anthropic-ai/sdk` for Node"
VERSION = INSTALLED.version
SETTING = "`baseURL` is `http://127.0.0.1:8000`, without `/v1` ([Messages](apis.md#anthropics-messages))."
MESSAGES = [{"role": "system", "content": "Answer in one sentence."},
            {"role": "user", "content": "What is the capital of Japan?"}]

pytestmark = INSTALLED.needed


def test_message(calls: Calls, smol: Server) -> None:
    """Answers a question with a system prompt: the text that plain HTTP returns, and the counted tokens."""
    message = calls["whole"]
    assert message["text"] == smol.chat(MESSAGES, 48) and "Tokyo" in message["text"]
    assert message["stop"] == "end_turn"
    assert message["usage"]["input_tokens"] == len(smol.post("/tokenize", messages=MESSAGES)["tokens"])


def test_stream(calls: Calls) -> None:
    """Streams the same answer in several pieces, with the same counts (`messages.stream`)."""
    streamed, whole = calls["stream"], calls["whole"]
    assert len(streamed["pieces"]) > 2 and "".join(streamed["pieces"]) == streamed["text"] == whole["text"]
    assert streamed["stop"] == whole["stop"]
    assert streamed["usage"]["output_tokens"] == whole["usage"]["output_tokens"] > 2


def test_tool(calls: Calls) -> None:
    """Streams a tool call that `tool_choice` requires, runs the tool, and streams the answer from its result."""
    tool = calls["tool"]
    assert (tool["stop"], tool["name"], tool["input"]) == ("tool_use", "weather", {"city": "Paris"})
    assert "sunny" in tool["answer"]


def test_count_tokens(calls: Calls) -> None:
    """Counts the tokens of a prompt as the answer's usage does."""
    assert calls["count"] == calls["whole"]["usage"]["input_tokens"]


def test_errors(calls: Calls) -> None:
    """A wrong key, an unknown model and a prompt that is too long are the client's own errors."""
    errors = calls["errors"]
    assert (errors["key"]["name"], errors["key"]["status"]) == ("AuthenticationError", 401)
    assert (errors["model"]["name"], errors["model"]["status"]) == ("NotFoundError", 404)
    assert errors["length"]["status"] == 400 and "prompt is too long" in errors["length"]["message"]
