"""promptfoo, which tests prompts, over `/v1/chat/completions`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from environments import Environment
from servers import Server

INSTALLED = Environment("promptfoo", "promptfoo")
CLIENT = "`promptfoo`"
VERSION = INSTALLED.version
SETTING = "A provider `openai:chat:NAME` with `apiBaseUrl: http://127.0.0.1:8000/v1` and `apiKey` in its `config`."
OFFLINE = {"PROMPTFOO_DISABLE_TELEMETRY": "1", "PROMPTFOO_DISABLE_UPDATE": "1",
           "PROMPTFOO_DISABLE_REMOTE_GENERATION": "1", "PROMPTFOO_SELF_HOSTED": "1"}
FAILED = 100  # promptfoo's exit status if an assertion fails
MESSAGES = [{"role": "system", "content": "Answer in one sentence."},
            {"role": "user", "content": "Which city is the capital of {{country}}?"}]
SCHEMA = {"type": "object", "properties": {"continent": {"enum": ["Europe", "Asia"]}}, "required": ["continent"]}

pytestmark = INSTALLED.needed


def evaluated(smol: Server, home: Path, tests: list[dict[str, Any]], status: int = 0, key: str = "",
              **config: Any) -> dict[str, Any]:
    """The results of `promptfoo eval` for a provider with the further settings `config`."""
    provider = {"id": f"openai:chat:{smol.model}", "config": {
        "apiBaseUrl": smol.base_url, "apiKey": key or smol.key, "temperature": 0, "max_tokens": 48} | config}
    written = {"prompts": [json.dumps(MESSAGES)], "providers": [provider], "tests": tests}
    (home / "promptfooconfig.json").write_text(json.dumps(written))
    INSTALLED.run("promptfoo", "eval", "-c", "promptfooconfig.json", "-o", "results.json", "--no-cache",
                  "--no-progress-bar", home=home, status=status, PROMPTFOO_CONFIG_DIR=str(home), **OFFLINE)
    return json.loads((home / "results.json").read_text())["results"]


def test_assertions(smol: Server, tmp_path: Path) -> None:
    """`promptfoo eval` checks answers to three prompts, each what plain HTTP answers, and counts their tokens."""
    tests = [{"vars": {"country": country}, "assert": [{"type": "icontains", "value": city}]}
             for country, city in {"France": "Paris", "Italy": "Rome", "Japan": "Tokyo"}.items()]
    results = evaluated(smol, tmp_path, tests)
    assert results["stats"]["successes"] == 3 and results["stats"]["failures"] == 0
    for result in results["results"]:
        asked = json.loads(json.dumps(MESSAGES).replace("{{country}}", result["vars"]["country"]))
        assert result["response"]["output"] == smol.chat(asked, 48)
        assert result["response"]["tokenUsage"]["completion"] > 0


def test_failed_assertion(smol: Server, tmp_path: Path) -> None:
    """An answer without the expected word fails its test."""
    tests = [{"vars": {"country": "France"}, "assert": [{"type": "equals", "value": "Rome"}]}]
    assert evaluated(smol, tmp_path, tests, status=FAILED)["stats"]["failures"] == 1


def test_schema(smol: Server, tmp_path: Path) -> None:
    """`response_format` with a JSON schema: the assertion `is-json` checks the answer by the same schema."""
    shape = {"type": "json_schema", "json_schema": {"name": "place", "strict": True, "schema": SCHEMA}}
    tests = [{"vars": {"country": "France"}, "assert": [{"type": "is-json", "value": SCHEMA}]}]
    assert evaluated(smol, tmp_path, tests, response_format=shape)["stats"]["successes"] == 1


def test_wrong_key(smol: Server, tmp_path: Path) -> None:
    """A wrong key ends the evaluation, with the server's message as the error of its test."""
    results = evaluated(smol, tmp_path, [{"vars": {"country": "France"}}], key="wrong")
    assert results["stats"]["successes"] == 0 and "Incorrect API key" in results["results"][0]["error"]
