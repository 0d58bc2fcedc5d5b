"""aider, which edits files in a repository, over `/v1/chat/completions`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from environments import Environment
from servers import Server

INSTALLED = Environment("aider", "aider-chat")
CLIENT = "`aider`"
VERSION = INSTALLED.version
SETTING = "`--model openai/NAME --openai-api-base http://127.0.0.1:8000/v1 --openai-api-key KEY`."
QUIET = ("--yes-always", "--no-git", "--no-analytics", "--no-check-update", "--no-show-model-warnings", "--no-pretty",
         "--no-gitignore", "--no-fancy-input", "--no-detect-urls", "--no-suggest-shell-commands", "--map-tokens", "0")
# A small model seldom keeps aider's format by itself: a grammar makes it write one file, and leaves the body to it.
EDIT = r"greeting\.py\n```\ndef greet\(name\):\n    return [^\n`]{1,40}\n```\n"

pytestmark = INSTALLED.needed


@pytest.fixture
def home(smol: Server, tmp_path: Path) -> Path:
    """A home with what aider cannot know about the model: its length."""
    limits = {"max_input_tokens": 8192, "max_output_tokens": 1024, "max_tokens": 1024, "input_cost_per_token": 0,
              "output_cost_per_token": 0, "litellm_provider": "openai", "mode": "chat"}
    (tmp_path / ".aider.model.metadata.json").write_text(json.dumps({f"openai/{smol.model}": limits}))
    return tmp_path


def aider(smol: Server, home: Path, *arguments: str, key: str = "") -> str:
    """What aider prints."""
    done = INSTALLED.run("aider", *QUIET, "--model", f"openai/{smol.model}", "--openai-api-base", smol.base_url,
                         "--openai-api-key", key or smol.key, *arguments, home=home)
    return done.stdout


def answer(printed: str) -> str:
    """What the model wrote, between aider's headings and the counts."""
    return printed.partition("Tokens:")[0].strip().splitlines()[-1]


def test_ask(smol: Server, home: Path) -> None:
    """`aider --message` asks a question, streaming and whole, and counts the tokens."""
    asked = ("--edit-format", "ask", "--message", "What is the capital of Japan?")
    streamed = aider(smol, home, *asked, "--stream")
    assert "Tokyo" in streamed and "Tokens:" in streamed
    assert answer(aider(smol, home, *asked, "--no-stream")) == answer(streamed)


def test_edit(smol: Server, home: Path) -> None:
    """`aider FILE --message` rewrites a file: aider's format comes from a grammar, the body from the model."""
    file = home / "greeting.py"
    file.write_text("def greet(name):\n    pass\n")
    settings = [{"name": f"openai/{smol.model}", "edit_format": "whole",
                 "extra_params": {"max_tokens": 200, "extra_body": {"structured_outputs": {"regex": EDIT}}}}]
    (home / "settings.yml").write_text(json.dumps(settings))
    printed = aider(smol, home, "--model-settings-file", "settings.yml", "--message",
                    "Return a greeting with the name.", "greeting.py")
    assert "Applied edit to greeting.py" in printed
    header, body = file.read_text().rstrip("\n").split("\n")
    assert header == "def greet(name):" and body.startswith("    return ") and body in printed


def test_wrong_key(smol: Server, home: Path) -> None:
    """A wrong key is shown as the provider's refusal."""
    printed = aider(smol, home, "--edit-format", "ask", "--message", "Hello?", key="wrong")
    assert "AuthenticationError" in printed
