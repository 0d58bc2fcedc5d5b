"""Inspect, which evaluates models, over `/v1/chat/completions`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from environments import Environment
from servers import Server

INSTALLED = Environment("inspect_ai", "inspect-ai")
CLIENT = "Inspect (`inspect-ai`)"
VERSION = INSTALLED.version
SETTING = ("`--model openai-api/slotwise/NAME`, with `http://127.0.0.1:8000/v1` in `SLOTWISE_BASE_URL` and a key in "
           "`SLOTWISE_API_KEY`.")

SYSTEM = {"role": "system", "content": "Answer in one sentence."}

pytestmark = INSTALLED.needed


def evaluated(task: str, smol: Server, home: Path, key: str = "") -> dict[str, Any]:
    """The log of an evaluation by `inspect eval`."""
    INSTALLED.run("inspect", "eval", f"{INSTALLED.folder / 'capitals.py'}@{task}", "--model",
                  f"openai-api/slotwise/{smol.model}", "--temperature", "0", "--max-retries", "0", "--log-format",
                  "json", "--log-dir", str(home / "logs"), "--display", "plain", home=home,
                  SLOTWISE_BASE_URL=smol.base_url, SLOTWISE_API_KEY=key or smol.key)
    (log,) = (home / "logs").glob("*.json")
    return json.loads(log.read_text())


def test_questions(smol: Server, tmp_path: Path) -> None:
    """`inspect eval` scores four questions: each answer is what plain HTTP answers, and tokens are counted."""
    log = evaluated("capitals", smol, tmp_path)
    assert log["status"] == "success"
    for sample in log["samples"]:
        answer = sample["output"]["choices"][0]["message"]["content"]
        assert answer == smol.chat([SYSTEM, {"role": "user", "content": sample["input"]}], 48)
        assert (sample["scores"]["includes"]["value"] == "C") == (sample["target"].lower() in answer.lower())
    (usage,) = log["stats"]["model_usage"].values()
    assert usage["input_tokens"] > 0 and usage["output_tokens"] > 0
    accuracy = log["results"]["scores"][0]["metrics"]["accuracy"]["value"]
    assert accuracy >= 0.75, "a model that knows capitals"


def test_choices(smol: Server, tmp_path: Path) -> None:
    """`multiple_choice` asks for a letter, and its scorer reads the answers."""
    log = evaluated("choices", smol, tmp_path)
    assert log["status"] == "success" and len(log["samples"]) == 4
    assert all(sample["scores"]["choice"]["value"] in ("C", "I") for sample in log["samples"])


def test_tool(smol: Server, tmp_path: Path) -> None:
    """`use_tools` with a `tool_choice`: the tool is executed, and the model answers with its result."""
    log = evaluated("forecast", smol, tmp_path)
    (sample,) = log["samples"]
    called = [call for message in sample["messages"] for call in message.get("tool_calls") or []]
    told = [message["content"] for message in sample["messages"] if message["role"] == "tool"]
    assert called[0]["arguments"] == {"city": "Paris"} and told[0] == "The weather in Paris is sunny, 18 degrees."
    assert sample["output"]["choices"][0]["message"]["content"]


def test_wrong_key(smol: Server, tmp_path: Path) -> None:
    """A wrong key ends the evaluation with the server's message in the log."""
    log = evaluated("capitals", smol, tmp_path, key="wrong")
    assert log["status"] == "error" and "key" in log["error"]["message"]
