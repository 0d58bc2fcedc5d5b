"""OpenAI's client for Node."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from servers import MAX_TOKENS, MESSAGES, PROMPT, Server

FOLDER = Path(__file__).parent
PACKAGE = FOLDER / "node_modules" / "openai" / "package.json"
CLIENT = "`openai` for Node"
VERSION = json.loads(PACKAGE.read_text())["version"] if PACKAGE.exists() else ""
SETTING = "`baseURL` is `http://127.0.0.1:8000/v1`; vLLM's fields stand next to OpenAI's."
GREEDY = {"temperature": 0, "max_tokens": MAX_TOKENS}

pytestmark = pytest.mark.skipif(
    not (shutil.which("node") and VERSION), reason="Node or its package `openai` is not installed.")


def node(call: str, server: Server, key: str = "", **body: Any) -> Any:
    """What the client returns, or its error, for a request with the fields `body`."""
    done = subprocess.run(
        ["node", "openai_node.mjs", call, server.base_url, key or server.key,
         json.dumps({"model": server.model} | body)],
        cwd=FOLDER, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_completion(builtin: Server) -> None:
    """Completes a prompt, whole."""
    answer = node("completion", builtin, prompt=PROMPT, **GREEDY)
    assert answer["choices"][0]["text"] == builtin.completion()
    assert answer["usage"]["completion_tokens"] > 0


def test_completion_stream(builtin: Server) -> None:
    """Completes a prompt as a stream, with the token counts in the last event."""
    *chunks, last = node("completion stream", builtin, prompt=PROMPT, stream_options={"include_usage": True}, **GREEDY)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == builtin.completion()
    assert last["choices"] == [] and last["usage"]["completion_tokens"] > 0


def test_chat(chat: Server) -> None:
    """Answers a conversation with a system message and earlier turns."""
    answer = node("chat", chat, messages=MESSAGES, **GREEDY)
    assert answer["choices"][0]["message"]["content"] == chat.chat()


def test_chat_stream(chat: Server) -> None:
    """Answers a conversation as a stream."""
    chunks = node("chat stream", chat, messages=MESSAGES, **GREEDY)
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == chat.chat()
    assert chunks[-1]["choices"][0]["finish_reason"] in ("stop", "length")


def test_chat_helper(chat: Server) -> None:
    """Answers through the helper `chat.completions.stream`, which puts the message together."""
    stop = chat.chat()[8:10]  # the helper refuses an answer that its length ended
    assert node("chat helper", chat, messages=MESSAGES, stop=stop, **GREEDY) == chat.chat().partition(stop)[0]


def test_models(builtin: Server) -> None:
    """Lists the model and retrieves it by its name."""
    assert [model["id"] for model in node("models", builtin)] == [builtin.model]
    assert node("model", builtin)["id"] == builtin.model


def test_logprobs(builtin: Server, chat: Server) -> None:
    """Log-probabilities of completions and chats."""
    logprobs = node("completion", builtin, prompt=PROMPT, logprobs=2, **GREEDY)["choices"][0]["logprobs"]
    assert "".join(logprobs["tokens"]) == builtin.completion()
    answer = node("chat", chat, messages=MESSAGES, logprobs=True, top_logprobs=2, **GREEDY)
    content = answer["choices"][0]["logprobs"]["content"]
    assert len(content) == answer["usage"]["completion_tokens"]
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)


def test_extra_fields(builtin: Server) -> None:
    """vLLM's fields in addition to OpenAI's: `ignore_eos`, `top_k`."""
    answer = node("completion", builtin, prompt=PROMPT, max_tokens=200, temperature=1, top_k=1, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 200
    assert answer["choices"][0]["text"].startswith(builtin.completion())


def test_errors(builtin: Server, chat: Server) -> None:
    """Errors have the client's own types, with status, `code` and `param`."""
    bad = node("completion", builtin, prompt=PROMPT, temperature=-1)["error"]
    assert (bad["name"], bad["status"], bad["param"]) == ("BadRequestError", 400, "temperature")
    unknown = node("model", builtin, model="gpt-4")["error"]
    assert (unknown["name"], unknown["code"]) == ("NotFoundError", "model_not_found")
    assert node("models", chat, key="wrong")["error"]["name"] == "AuthenticationError"


def test_tools(chat: Server) -> None:
    """Offers tools to a model whose template has none (`tools`): the system prompt describes them."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    answer = node("chat", chat, messages=MESSAGES, tools=tools, **GREEDY)
    assert answer["choices"][0]["message"]["content"] == chat.chat(tools=tools) != chat.chat()
