"""DSPy, over `/v1/chat/completions`."""

from __future__ import annotations

import pytest
from environments import Calls, Environment
from servers import Server

INSTALLED = Environment("dspy", "dspy")
CLIENT = "DSPy (`dspy`)"
VERSION = INSTALLED.version
SETTING = ('`dspy.LM("openai/NAME", api_base="http://127.0.0.1:8000/v1", api_key=...)`; for schemas and tools, '
           '`register_provider` with `ModelSupport(function_calling=True, response_schema=True)`.')
MESSAGES = [{"role": "user", "content": "What is the capital of Japan?"}]

pytestmark = INSTALLED.needed


@pytest.mark.parametrize("provider", ["openai", "slotwise"])
def test_lm(calls: Calls, smol: Server, provider: str) -> None:
    """`dspy.LM` answers what plain HTTP answers, as `{provider}/NAME`."""
    answer = calls["answer"][provider]
    assert answer == smol.chat(MESSAGES, 200) and "Tokyo" in answer


def test_predict(calls: Calls) -> None:
    """`Predict` with the `JSONAdapter` fills the signature's field by a JSON schema, and counts the tokens."""
    result = calls["predict"]
    assert "Tokyo" in result["answer"]
    assert result["usage"] and all(usage["completion_tokens"] > 0 for usage in result["usage"])


def test_typed(calls: Calls) -> None:
    """An output of type `Literal` has one of its values, by a JSON schema."""
    assert calls["typed"] in ("Europe", "Asia", "Africa")


def test_tool(calls: Calls) -> None:
    """A predictor that must call a tool (`dspy.ToolCalls`): the call is executed with the model's argument."""
    result = calls["tool"]
    assert result["ran"] == ["Paris"] and result["results"] == ["The weather in Paris is sunny, 18 degrees."]


def test_wrong_key(calls: Calls) -> None:
    """A wrong key is an error with the server's message."""
    assert "key" in calls["wrong_key"]
