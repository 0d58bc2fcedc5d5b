"""LiteLLM's proxy in front of a server: OpenAI's and Anthropic's clients of the proxy reach the model."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from environments import Environment
from servers import Server

INSTALLED = Environment("litellm_proxy", "litellm")
CLIENT = "LiteLLM's proxy (`litellm[proxy]`)"
VERSION = INSTALLED.version
SETTING = ('An entry of `model_list` whose `litellm_params` have `model: hosted_vllm/NAME` and '
           '`api_base: http://127.0.0.1:8000/v1`.')
MESSAGES = [{"role": "user", "content": "What is the capital of Japan?"}]
GREEDY = {"messages": MESSAGES, "max_tokens": 48, "temperature": 0}
TOOL = {"name": "weather", "description": "The weather in a city.", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}
CONFIG = """
model_list:
  - model_name: smol
    litellm_params: {{model: hosted_vllm/{server.model}, api_base: "{server.base_url}", api_key: {server.key}}}
  - model_name: stranger
    litellm_params: {{model: hosted_vllm/{server.model}, api_base: "{server.base_url}", api_key: wrong}}
litellm_settings: {{num_retries: 0, telemetry: false}}
general_settings: {{master_key: sk-proxy}}
"""

pytestmark = INSTALLED.needed


@pytest.fixture(scope="module")
def proxy(smol: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A proxy that has been started, and its HTTP client."""
    home = tmp_path_factory.mktemp("proxy")
    (home / "config.yaml").write_text(CONFIG.format(server=smol))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [INSTALLED.program("litellm"), "--config", "config.yaml", "--host", "127.0.0.1", "--port", str(port)]
    with (home / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=home, env=os.environ | {"HOME": str(home)}, stdin=subprocess.DEVNULL,
                                   stdout=log, stderr=log)
    key = {"Authorization": "Bearer sk-proxy"}
    client = httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=key, timeout=120)
    try:
        with client:
            while not _answers(client):
                assert process.poll() is None, (home / "log").read_text()
                time.sleep(0.2)
            yield client
    finally:
        process.terminate()
        process.wait(60)


def _answers(client: httpx.Client) -> bool:
    try:
        return client.get("/health/liveliness").status_code == 200
    except httpx.TransportError:
        return False


def test_models(proxy: httpx.Client) -> None:
    """The proxy lists the models of its configuration."""
    assert {model["id"] for model in proxy.get("/v1/models").json()["data"]} == {"smol", "stranger"}


def test_chat(proxy: httpx.Client, smol: Server) -> None:
    """A chat through the proxy answers what the server answers, with its token counts."""
    body = proxy.post("/v1/chat/completions", json={"model": "smol"} | GREEDY).json()
    direct = smol.post("/v1/chat/completions", **GREEDY)
    assert body["choices"][0]["message"]["content"] == direct["choices"][0]["message"]["content"]
    assert "Tokyo" in body["choices"][0]["message"]["content"]
    assert all(body["usage"][count] == direct["usage"][count] for count in ("prompt_tokens", "completion_tokens"))


def test_stream(proxy: httpx.Client, smol: Server) -> None:
    """A stream through the proxy has the same answer piece by piece."""
    with proxy.stream("POST", "/v1/chat/completions", json={"model": "smol", "stream": True} | GREEDY) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    deltas = [choice["delta"].get("content") for line in lines for choice in json.loads(line)["choices"]]
    pieces = [delta for delta in deltas if delta]
    assert "".join(pieces) == smol.chat(MESSAGES, 48)


def test_tool(proxy: httpx.Client) -> None:
    """A tool that must be called, through the proxy."""
    asked: dict[str, Any] = GREEDY | {
        "model": "smol", "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
        "tools": [{"type": "function", "function": TOOL}],
        "tool_choice": {"type": "function", "function": {"name": "weather"}}}
    (call,) = proxy.post("/v1/chat/completions", json=asked).json()["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}


def test_anthropic(proxy: httpx.Client, smol: Server) -> None:
    """Anthropic's messages, which the proxy translates into chat completions."""
    body = proxy.post("/v1/messages", json={"model": "smol"} | GREEDY).json()
    assert "".join(block.get("text", "") for block in body["content"]) == smol.chat(MESSAGES, 48)
    assert body["usage"]["output_tokens"] > 0


def test_wrong_key(proxy: httpx.Client) -> None:
    """A key that the server refuses is the proxy's 401, with the server's message."""
    response = proxy.post("/v1/chat/completions", json={"model": "stranger"} | GREEDY)
    assert response.status_code == 401 and "key" in response.json()["error"]["message"]
