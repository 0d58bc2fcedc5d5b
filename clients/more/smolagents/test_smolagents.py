"""smolagents over `/v1/chat/completions`."""

from __future__ import annotations

from environments import Calls, Environment
from servers import Server

INSTALLED = Environment("smolagents", "smolagents")
CLIENT = "`smolagents`"
VERSION = INSTALLED.version
SETTING = '`OpenAIModel(NAME, api_base="http://127.0.0.1:8000/v1", api_key=...)`.'
MESSAGES = [{"role": "user", "content": "What is the capital of Japan?"}]

pytestmark = INSTALLED.needed


def test_answer(calls: Calls, smol: Server) -> None:
    """`OpenAIModel.generate` answers what plain HTTP answers, with the token counts."""
    result = calls["whole"]
    assert result["text"] == smol.chat(MESSAGES, 48) and "Tokyo" in result["text"]
    assert result["input"] == len(smol.post("/tokenize", messages=MESSAGES)["tokens"])


def test_stream(calls: Calls) -> None:
    """`OpenAIModel.generate_stream` yields the same answer in several pieces, with the same counts."""
    result, whole = calls["stream"], calls["whole"]
    assert len(result["pieces"]) > 2 and "".join(result["pieces"]) == whole["text"]
    assert (result["input"], result["output"]) == (whole["input"], whole["output"])


def test_agent(calls: Calls) -> None:
    """A `ToolCallingAgent`, which requires a call in each step, executes the tool with the model's argument."""
    result = calls["agent"]
    assert result["ran"] and all("Paris" in city for city in result["ran"])
    assert result["output"] and result["input"] > 0


def test_wrong_key(calls: Calls) -> None:
    """A wrong key is an `AuthenticationError` with the server's message."""
    assert "key" in calls["wrong_key"]
