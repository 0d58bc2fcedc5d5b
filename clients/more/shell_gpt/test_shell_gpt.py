"""ShellGPT, the command `sgpt`, over `/v1/chat/completions`."""

from __future__ import annotations

from pathlib import Path

import pytest
from environments import Environment
from servers import Server

INSTALLED = Environment("shell_gpt", "shell-gpt")
CLIENT = "`shell-gpt`"
VERSION = INSTALLED.version
SETTING = ("In `~/.config/shell_gpt/.sgptrc`, `API_BASE_URL` is `http://127.0.0.1:8000/v1` and `DEFAULT_MODEL` the "
           "model's name.")
SETTINGS = {"PRETTIFY_MARKDOWN": "false"}
GREEDY = ("--temperature", "0", "--no-cache")
QUESTION = "What is the capital of Japan?"

pytestmark = INSTALLED.needed


@pytest.fixture
def home(smol: Server, tmp_path: Path) -> Path:
    """A home whose settings name the server."""
    folder = tmp_path / ".config" / "shell_gpt"
    folder.mkdir(parents=True)
    settings = {"OPENAI_API_KEY": smol.key, "API_BASE_URL": smol.base_url, "DEFAULT_MODEL": smol.model,
                "CHAT_CACHE_PATH": str(tmp_path / "chats"), "CACHE_PATH": str(tmp_path / "cache")} | SETTINGS
    (folder / ".sgptrc").write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
    return tmp_path


def sgpt(home: Path, *arguments: str, **more: str) -> str:
    return INSTALLED.run("sgpt", *arguments, *GREEDY, home=home, **more).stdout.strip()


def test_answer(home: Path) -> None:
    """`sgpt QUESTION` answers, streaming and whole."""
    streamed = sgpt(home, QUESTION)
    assert "Tokyo" in streamed
    assert sgpt(home, QUESTION, DISABLE_STREAMING="true") == streamed


def test_pipe(home: Path) -> None:
    """Text that is piped in stands before the question."""
    assert sgpt(home, stdin="Which city is the capital of Italy?").count("Rome")


def test_code(home: Path) -> None:
    """`sgpt --code` writes code."""
    assert "def " in sgpt(home, "--code", "a Python function that adds two numbers")


def test_chat(home: Path) -> None:
    """`sgpt --chat` sends earlier turns again, and `--show-chat` has them."""
    first = sgpt(home, "--chat", "trip", QUESTION)
    second = sgpt(home, "--chat", "trip", "Which city did I ask about?")
    shown = INSTALLED.run("sgpt", "--show-chat", "trip", home=home).stdout
    assert all(" ".join(text.split())[:40] in " ".join(shown.split()) for text in (QUESTION, first, second))


def test_wrong_key(home: Path) -> None:
    """A wrong key is shown with the server's message."""
    done = INSTALLED.run("sgpt", QUESTION, *GREEDY, home=home, status=1, OPENAI_API_KEY="wrong")
    assert "key" in done.stdout + done.stderr
