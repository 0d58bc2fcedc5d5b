"""Servers that clients are tried against, and what plain HTTP gets from them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from support.live import serving

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = (str(ROOT / ".venv" / "bin" / "slotwise"),)  # the project's own environment, not the clients'
BUILTIN = ROOT / "src" / "slotwise" / "builtin"
PROMPT = "def close(self):"
MESSAGES = [
    {"role": "system", "content": "Answer in one line."},
    {"role": "user", "content": "What is a slot?"},
    {"role": "assistant", "content": "A row of the batch."},
    {"role": "user", "content": "And what is a block?"},
]
MAX_TOKENS = 24


@dataclass(frozen=True)
class Server:
    url: str  # without /v1
    model: str
    key: str  # "none" where the server has no keys
    http: httpx.Client

    @property
    def base_url(self) -> str:
        return f"{self.url}/v1"

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        response = self.http.post(path, json={"model": self.model} | body)
        assert response.status_code == 200, response.text
        return response.json()

    def completion(self, prompt: str | list[int] = PROMPT, max_tokens: int = MAX_TOKENS) -> str:
        """The greedy continuation of a prompt."""
        body = self.post("/v1/completions", prompt=prompt, max_tokens=max_tokens, temperature=0)
        return body["choices"][0]["text"]

    def chat(self, messages: list[dict[str, Any]] = MESSAGES, max_tokens: int = MAX_TOKENS, **more: Any) -> str:
        """The greedy answer to a conversation."""
        body = self.post("/v1/chat/completions", messages=messages, max_tokens=max_tokens, temperature=0, **more)
        return body["choices"][0]["message"]["content"]


@contextmanager
def started(folder: Path | str | None, model: str, key: str, log: Path, *more: str) -> Iterator[Server]:
    """A server in float32, whose greedy outputs do not depend on what else is in the batch.

    Args:
        folder: a checkpoint's folder, or the name of a model; None: the built-in model.
        key: the API key that the server demands; empty: none.
        more: further options of the command line.
    """
    arguments = [*([str(folder)] if folder else []), "--served-model-name", model, "--dtype", "float32", *more]
    if key:
        arguments += ["--api-key", key]
    with serving(*arguments, log=log, program=PROGRAM) as live:
        if key:
            live.client.headers["Authorization"] = f"Bearer {key}"
        yield Server(live.url, model, key or "none", live.client)
