"""Open WebUI: the HTTP requests that its backend sends to a connection of type OpenAI.

It is not installed.  The bodies are those of backend/open_webui/routers/openai.py: `metadata` is taken out of what the
page sends, and `max_completion_tokens` becomes `max_tokens`.  Streams are read by lines, as in
backend/open_webui/utils/middleware.py.
"""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from servers import MAX_TOKENS, MESSAGES, Server

CLIENT = "Open WebUI"
VERSION = "replayed"
SETTING = "Settings, Connections, OpenAI API: the URL with `/v1`, and a key."
USER = {  # with ENABLE_FORWARD_USER_INFO_HEADERS
    "X-OpenWebUI-User-Name": "Ada%20Lovelace", "X-OpenWebUI-User-Id": "6f1c", "X-OpenWebUI-User-Email": "ada@localhost",
    "X-OpenWebUI-User-Role": "user", "X-OpenWebUI-Chat-Id": "41b2"}
TASK = "### Task:\nGenerate a title of three words for the chat.\n### Chat History:\nUSER: What is a slot?"


def streamed(server: Server, **body: Any) -> tuple[str, dict[str, int]]:
    """The text of a stream and its token counts; every line that begins with `data:` has JSON or ends the stream."""
    text, usage, ended = "", {}, False
    asked = {"stream": True, "model": server.model, "messages": MESSAGES} | body
    with server.http.stream("POST", "/v1/chat/completions", json=asked, headers=USER) as response:
        assert response.status_code == 200, response.read()
        assert "text/event-stream" in response.headers["Content-Type"]
        for line in response.iter_lines():
            if not line.startswith("data:"):
                assert not line.strip()
                continue
            data = line.removeprefix("data:").strip()
            if ended := data == "[DONE]":
                break
            chunk = json.loads(data)
            assert "error" not in chunk
            usage = chunk.get("usage") or usage
            for choice in chunk.get("choices", [])[:1]:
                text += choice["delta"].get("content") or ""
    assert ended
    return text, usage


def test_connection(chat: Server) -> None:
    """Verifies a connection and lists its models: `GET /v1/models` with a bearer key."""
    models = chat.http.get("/v1/models", headers=USER).json()
    assert [model["id"] for model in models["data"]] == [chat.model] and "error" not in models
    refused = httpx.get(f"{chat.base_url}/models", headers={"Authorization": "Bearer wrong"}, timeout=120)
    assert refused.status_code == 401 and refused.json()["error"]["message"]


def test_without_a_key(builtin: Server) -> None:
    """Lists models of a server without keys, with an empty key."""
    response = httpx.get(f"{builtin.base_url}/models", headers={"Authorization": "Bearer"}, timeout=120)
    assert response.status_code == 200


def test_chat(chat: Server) -> None:
    """A chat: a stream with a system prompt and earlier turns, and the headers of a user."""
    text, _ = streamed(chat, temperature=0, max_tokens=MAX_TOKENS)
    assert text == chat.chat()


def test_usage(chat: Server) -> None:
    """A chat of a model with the capability `usage`: `stream_options`, and the counts in the stream."""
    text, usage = streamed(chat, stream_options={"include_usage": True}, temperature=0, max_tokens=MAX_TOKENS)
    assert text == chat.chat()
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] > 0


def test_advanced_parameters(chat: Server) -> None:
    """The advanced parameters of a chat; a header names the one that is unknown (Ollama's `repeat_penalty`)."""
    parameters = {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "frequency_penalty": 0.1,
                  "presence_penalty": 0.1, "repeat_penalty": 1.1, "seed": 42, "stop": ["</answer>"],
                  "logit_bias": {"5": -100}, "max_tokens": MAX_TOKENS}
    text, usage = streamed(chat, stream_options={"include_usage": True}, **parameters)
    whole = chat.http.post("/v1/chat/completions", json={"messages": MESSAGES} | parameters)
    assert text == whole.json()["choices"][0]["message"]["content"] != chat.chat()
    assert usage == whole.json()["usage"]
    assert "repeat_penalty" in whole.headers["x-slotwise-warning"]


@pytest.mark.parametrize("task", ["title", "follow_up", "tags"])
def test_task(chat: Server, task: str) -> None:
    """A task next to the chat, whole: `{task}` generation."""
    messages = [{"role": "user", "content": TASK}]
    limit = {"max_tokens": 1000} if task == "title" else {}
    answer = chat.post("/v1/chat/completions", messages=messages, stream=False, **limit)
    (choice,) = answer["choices"]
    assert choice["message"]["role"] == "assistant" and isinstance(choice["message"]["content"], str)
    assert choice["finish_reason"] in ("stop", "length") and answer["usage"]["completion_tokens"] > 0


def test_tools(chat: Server) -> None:
    """A chat with tools and function calling `native` (`tools`), of a model whose template has none."""
    tools = [{"type": "function", "function": {"name": "search", "parameters": {"type": "object", "properties": {}}}}]
    text, _ = streamed(chat, temperature=0, max_tokens=MAX_TOKENS, tools=tools)
    assert text == chat.chat(tools=tools) != chat.chat()
