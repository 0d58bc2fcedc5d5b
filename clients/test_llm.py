"""Simon Willison's `llm`, a command, told of a server by extra-openai-models.yaml."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from servers import MAX_TOKENS, PROMPT, Server

CLIENT = "`llm`"
VERSION = version("llm")
SETTING = "An entry in `extra-openai-models.yaml` with `model_name` and `api_base`; `completion: true` for completions."
PROGRAM = Path(sys.executable).with_name("llm")
GREEDY = ("-o", "temperature", "0", "-o", "max_tokens", str(MAX_TOKENS))
MODELS = """
- model_id: code
  model_name: {builtin.model}
  api_base: {builtin.base_url}
  completion: true
- model_id: talk
  model_name: {chat.model}
  api_base: {chat.base_url}
  api_key_name: slotwise
"""


@pytest.fixture(scope="module", autouse=True)
def _models(builtin: Server, chat: Server) -> None:
    folder = Path(os.environ["LLM_USER_PATH"])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "extra-openai-models.yaml").write_text(MODELS.format(builtin=builtin, chat=chat))
    (folder / "keys.json").write_text(json.dumps({"slotwise": chat.key}))


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([PROGRAM, *arguments], capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    return done


def llm(*arguments: str) -> str:
    return run(*arguments).stdout.removesuffix("\n")


def test_models() -> None:
    """`llm models` lists both models."""
    listed = llm("models")
    assert "OpenAI Completion: code" in listed and "OpenAI Chat: talk" in listed


def test_completion(builtin: Server) -> None:
    """Completes a prompt with `completion: true`, streaming and whole."""
    assert llm("-m", "code", PROMPT, *GREEDY) == builtin.completion()
    assert llm("-m", "code", PROMPT, "--no-stream", *GREEDY) == builtin.completion()


def test_chat(chat: Server) -> None:
    """Answers with a system prompt, streaming and whole, with a key from `llm keys`."""
    expected = chat.chat([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a slot?"}])
    for more in ((), ("--no-stream",)):
        assert llm("-m", "talk", "-s", "Be brief.", "What is a slot?", *more, *GREEDY) == expected


def test_conversation(chat: Server) -> None:
    """Continues a conversation (`llm -c`): earlier turns are sent again."""
    first = llm("-m", "talk", "What is a slot?", *GREEDY)
    second = llm("-c", "And what is a block?", *GREEDY)
    turns = [("user", "What is a slot?"), ("assistant", first), ("user", "And what is a block?")]
    assert second == chat.chat([{"role": role, "content": content} for role, content in turns])


def test_usage() -> None:
    """Reads the token counts of a stream (`--usage`)."""
    told = run("-m", "talk", "--usage", "What is a slot?", *GREEDY).stderr
    assert "Token usage" in told and f"{MAX_TOKENS} output" in told
