"""LlamaIndex' `OpenAILike`, over `/v1/chat/completions` and `/v1/completions`."""

from __future__ import annotations

from environments import Calls, Environment
from servers import Server

INSTALLED = Environment("llama_index", "llama-index-llms-openai-like")
CLIENT = "LlamaIndex (`llama-index-llms-openai-like`)"
VERSION = INSTALLED.version
SETTING = ('`OpenAILike(model=NAME, api_base="http://127.0.0.1:8000/v1", api_key=..., is_chat_model=True, '
           'is_function_calling_model=True)`.')
MESSAGES = [{"role": "user", "content": "What is the capital of Japan?"}]

pytestmark = INSTALLED.needed


def test_chat(calls: Calls, smol: Server) -> None:
    """`chat` answers what plain HTTP answers, with the token counts."""
    result = calls["chat"]
    assert result["text"] == smol.chat(MESSAGES, 48) and "Tokyo" in result["text"]
    assert result["usage"]["prompt_tokens"] == len(smol.post("/tokenize", messages=MESSAGES)["tokens"])


def test_chat_stream(calls: Calls) -> None:
    """`stream_chat` yields the same answer piece by piece."""
    pieces = calls["chat_stream"]
    assert "".join(pieces) == calls["chat"]["text"]


def test_chats(calls: Calls) -> None:
    """`achat`: four conversations at once have the same answer as one alone."""
    assert calls["chats"] == [calls["chat"]["text"]] * 4


def test_completion(calls: Calls, smol: Server) -> None:
    """`complete` and `stream_complete` continue a text, with `is_chat_model=False`."""
    result = calls["completion"]
    assert result["whole"] == smol.completion("The capital of Japan is", 48) and "Tokyo" in result["whole"]
    assert len(result["pieces"]) > 2 and "".join(result["pieces"]) == result["whole"]


def test_tool(calls: Calls) -> None:
    """`predict_and_call` with `tool_required` executes the tool with the model's argument."""
    result = calls["tool"]
    assert result["ran"] == ["Paris"] and result["text"] == "The weather in Paris is sunny, 18 degrees."


def test_structured_output(calls: Calls) -> None:
    """`as_structured_llm` fills a pydantic model through a function that must be called."""
    assert calls["structured"]["continent"] in ("Europe", "Asia", "Africa")


def test_wrong_key(calls: Calls) -> None:
    """A wrong key is an `AuthenticationError` with the server's message."""
    assert "key" in calls["wrong_key"]
