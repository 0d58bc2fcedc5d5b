"""Vercel's AI SDK, with its provider for OpenAI-compatible servers."""

from __future__ import annotations

from environments import Calls, Environment
from servers import Server

INSTALLED = Environment("ai_sdk", "ai")
CLIENT = "AI SDK for Node (`ai`)"
VERSION = INSTALLED.version
SETTING = '`createOpenAICompatible({ name: "slotwise", baseURL: "http://127.0.0.1:8000/v1" })`.'
MESSAGES = [{"role": "user", "content": "What is the capital of Japan?"}]

pytestmark = INSTALLED.needed


def test_text(calls: Calls, smol: Server) -> None:
    """`generateText` answers what plain HTTP answers, with the token counts."""
    result = calls["whole"]
    assert result["text"] == smol.chat(MESSAGES, 48) and "Tokyo" in result["text"]
    assert result["finishReason"] == "stop"
    assert result["usage"]["inputTokens"] == len(smol.post("/tokenize", messages=MESSAGES)["tokens"])


def test_stream(calls: Calls) -> None:
    """`streamText` yields the same answer in several pieces, with the same counts."""
    result, whole = calls["stream"], calls["whole"]
    assert len(result["pieces"]) > 2 and "".join(result["pieces"]) == whole["text"]
    assert (result["finishReason"], result["usage"]) == (whole["finishReason"], whole["usage"])


def test_tool(calls: Calls) -> None:
    """A tool that the first step must call is executed with its arguments, and the second step answers."""
    result = calls["tools"]
    assert result["ran"] == ["Paris"] and result["reasons"] == ["tool-calls", "stop"]
    assert "sunny" in result["answer"]


def test_object(calls: Calls) -> None:
    """`Output.object` by a schema of zod: the output has its properties and one of the allowed values."""
    output = calls["object"]
    assert set(output) == {"city", "continent"} and output["continent"] in ("Europe", "Asia", "Africa")


def test_errors(calls: Calls) -> None:
    """A wrong key, an unknown model and a prompt that is too long are `APICallError`s with the server's message."""
    errors = calls["errors"]
    assert {name: error["status"] for name, error in errors.items()} == {"key": 401, "model": 404, "length": 400}
    assert "gpt-4" in errors["model"]["message"] and "8192" in errors["length"]["message"]
