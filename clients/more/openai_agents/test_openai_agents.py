"""OpenAI's agents SDK, over `/v1/responses` and `/v1/chat/completions`."""

from __future__ import annotations

import pytest
from environments import Calls, Environment
from servers import Server

INSTALLED = Environment("openai_agents", "openai-agents")
CLIENT = "`openai-agents`"
VERSION = INSTALLED.version
SETTING = ('`OpenAIResponsesModel` or `OpenAIChatCompletionsModel` with '
           '`openai_client=AsyncOpenAI(base_url="http://127.0.0.1:8000/v1", api_key=...)`.')
MESSAGES = [{"role": "system", "content": "Answer in one sentence."},
            {"role": "user", "content": "What is the capital of Japan?"}]

pytestmark = [INSTALLED.needed, pytest.mark.parametrize("over", ["responses", "chat"])]


def test_answer(calls: Calls, smol: Server, over: str) -> None:
    """An agent answers what plain HTTP answers, and counts its tokens, over {over}."""
    result = calls["whole"][over]
    assert result["text"] == smol.chat(MESSAGES, 48) and "Tokyo" in result["text"]
    assert result["usage"]["input"] == len(smol.post("/tokenize", messages=MESSAGES)["tokens"])


def test_stream(calls: Calls, over: str) -> None:
    """A streamed run yields the same answer in several pieces, with the same counts, over {over}."""
    result, whole = calls["stream"][over], calls["whole"][over]
    assert len(result["pieces"]) > 2 and "".join(result["pieces"]) == result["text"] == whole["text"]
    assert result["usage"] == whole["usage"]


def test_tool(calls: Calls, over: str) -> None:
    """A function tool that the first turn must call is executed, and the second turn answers from it, over {over}."""
    result = calls["tool"][over]
    assert result["ran"] == ["Paris"] and result["usage"]["requests"] == 2
    assert result["items"] == ["tool_call_item", "tool_call_output_item", "message_output_item"]
    assert "sunny" in result["text"]


def test_output_type(calls: Calls, over: str) -> None:
    """An agent whose output is a pydantic model, by a schema, over {over}."""
    assert calls["output_type"][over]["continent"] in ("Europe", "Asia", "Africa")


def test_tool_and_output_type(calls: Calls, over: str) -> None:
    """A turn with an output type and a tool that it must call executes the tool, over {over}."""
    result = calls["tool_and_output_type"][over]
    assert result["ran"] == ["Paris"] and "sunny" in result["output"]


def test_wrong_key(calls: Calls, over: str) -> None:
    """A wrong key is the client's own error with the server's message, over {over}."""
    told = calls["wrong_key"][over]
    assert told["status"] == 401 and "key" in told["message"]
