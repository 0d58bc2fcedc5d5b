"""CrewAI, over `/v1/chat/completions`."""

from __future__ import annotations

from environments import Calls, Environment
from servers import Server

INSTALLED = Environment("crewai", "crewai")
CLIENT = "CrewAI (`crewai`)"
VERSION = INSTALLED.version
SETTING = '`LLM(model="openai/NAME", base_url="http://127.0.0.1:8000/v1", api_key=...)`.'
MESSAGES = [{"role": "user", "content": "What is the capital of Japan?"}]

pytestmark = INSTALLED.needed


def test_llm(calls: Calls, smol: Server) -> None:
    """`LLM.call` answers what plain HTTP answers."""
    assert calls["whole"] == smol.chat(MESSAGES, 64) and "Tokyo" in calls["whole"]


def test_task(calls: Calls) -> None:
    """A crew of one agent does a task, and the tokens are counted."""
    result = calls["task"]
    assert "Tokyo" in result["text"] and result["usage"]["completion_tokens"] > 0


def test_tool(calls: Calls) -> None:
    """An agent that must call a tool executes it with the model's argument; its result is the crew's answer."""
    result = calls["agent"]
    assert result["ran"] == ["Paris"] and result["text"] == "The weather in Paris is sunny, 18 degrees."


def test_wrong_key(calls: Calls) -> None:
    """A wrong key is an error with the server's message."""
    assert "key" in calls["wrong_key"]
