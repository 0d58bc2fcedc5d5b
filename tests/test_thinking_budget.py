"""`thinking_token_budget` and Anthropic's `budget_tokens`, by a checkpoint that would reason for longer."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import scripted
from support.live import Live, serving

from slotwise.core.params import ThinkingBudget
from slotwise.measure.simulate.replay import replay
from slotwise.observe import event_log, log_file

TEMPLATE = scripted.TEMPLATE + (
    "{% if enable_thinking is defined %}{{ '<think>' if enable_thinking else '<think></think>' }}{% endif %}")
THOUGHT = "\nWhere is Paris, and what else is there?\n"
ANSWER = "In France."
CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
BEGUN = {"chat_template_kwargs": {"enable_thinking": True}}


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("log")


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory, log: Path) -> Iterator[Live]:
    folder = scripted.write(tmp_path_factory.mktemp("scripted"), {"#reason": f"<think>{THOUGHT}</think>\n\n{ANSWER}"},
                            TEMPLATE, ["<think>", "</think>"])
    with serving(str(folder), "--served-model-name", "scripted", "--dtype", "float32", "--reasoning-parser", "qwen3",
                 "--event-log", str(log / "events"), log=log / "stderr") as started:
        yield started


def sent(live: Live, path: str, **fields: Any) -> dict[str, Any]:
    body = {"temperature": 0, "max_tokens": 100} | fields
    if path != COMPLETIONS:
        body["messages"] = [{"role": "user", "content": "Where? #reason"}]
    answer = live.client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def asked(live: Live, **fields: Any) -> tuple[str, str, list[int]]:
    """Reasoning, content and tokens of a chat."""
    choice = sent(live, CHAT, return_token_ids=True, **fields)["choices"][0]
    return choice["message"].get("reasoning_content") or "", choice["message"]["content"], choice["token_ids"]


def streamed(live: Live, **fields: Any) -> tuple[str, str]:
    body = {"messages": [{"role": "user", "content": "Where? #reason"}], "temperature": 0, "stream": True, **fields}
    reasoning = content = ""
    with live.client.stream("POST", CHAT, json=body) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                delta = json.loads(line[6:])["choices"][0]["delta"]
                reasoning += delta.get("reasoning_content") or ""
                content += delta.get("content") or ""
    return reasoning, content


def tags(live: Live) -> list[int]:
    body = {"prompt": "<think></think>", "add_special_tokens": False}
    found: list[int] = live.client.post("/tokenize", json=body).json()["tokens"]
    return found


@pytest.mark.parametrize("budget", [0, 1, 3])
def test_reasoning_ends_with_its_budget(live: Live, budget: int) -> None:
    begin, end = tags(live)
    usual, content, tokens = asked(live)
    assert (usual, content) == (THOUGHT.strip(), ANSWER) and tokens.index(end) > 4 and tokens[0] == begin
    reasoning, content, cut = asked(live, thinking_token_budget=budget)
    assert cut[: budget + 2] == [*tokens[: budget + 1], end] and content == ANSWER and usual.startswith(reasoning)
    assert cut[budget + 2 :] == tokens[tokens.index(end) + 1 :]
    assert streamed(live, thinking_token_budget=budget) == (reasoning, ANSWER)
    prompt_begins, content, within = asked(live, thinking_token_budget=budget, **BEGUN)
    assert (prompt_begins, content, within) == (reasoning, ANSWER, cut[1:])


def test_a_budget_that_is_not_used_up_changes_nothing(live: Live) -> None:
    for budget in (-1, 90, 2**63 - 1):
        assert asked(live, thinking_token_budget=budget) == asked(live)
    kept = {"chat_template_kwargs": {"enable_thinking": False}}
    assert asked(live, thinking_token_budget=0, **kept) == asked(live, **kept)


def test_an_answer_that_matches_a_schema_follows(live: Live) -> None:
    _, end = tags(live)
    fields = {"structured_outputs": {"choice": ["yes"]}, "thinking_token_budget": 2}
    reasoning, content, tokens = asked(live, **BEGUN, **fields)
    assert reasoning and content == "yes" and tokens.index(end) == 2
    assert asked(live, **BEGUN, **fields, temperature=1, seed=3, repetition_penalty=1.3)[1] == "yes"


def test_completions_have_the_budget_of_their_prompt(live: Live) -> None:
    begin, end = tags(live)
    prompt = sent(live, CHAT, return_token_ids=True)["prompt_token_ids"]
    for given, place in (("Where? #reason", 3), (prompt, 3), ("Where? #reason<think>", 2), ([*prompt, begin], 2)):
        choice = sent(live, COMPLETIONS, prompt=given, thinking_token_budget=2, return_token_ids=True)["choices"][0]
        assert choice["token_ids"].index(end) == place
    for fields in ({"prompt": ["x", "y<think>"]}, {"prompt": "x<think>", "guided_choice": ["yes"]}):
        answer = live.client.post(COMPLETIONS, json=fields | {"thinking_token_budget": 2})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "thinking_token_budget"


def test_anthropics_budget(live: Live) -> None:
    message = sent(live, MESSAGES, thinking={"type": "enabled", "budget_tokens": 3})
    reasoning, _, tokens = asked(live, thinking_token_budget=3, **BEGUN)
    thinking, text = message["content"]
    assert (thinking["thinking"], text["text"]) == (reasoning, ANSWER)
    assert message["usage"]["output_tokens"] == len(tokens)


def test_thinking_that_is_disabled_ends_at_once(tmp_path: Path) -> None:
    """Of a model that always begins with it, and whose template cannot leave it out."""
    folder = scripted.write(tmp_path, {"#reason": f"{THOUGHT}</think>\n\n{ANSWER}"},
                            scripted.TEMPLATE + "<think>", ["<think>", "</think>"])
    with serving(str(folder), "--served-model-name", "scripted", "--dtype", "float32", "--reasoning-parser",
                 "deepseek_r1", log=tmp_path / "stderr") as always:
        enabled, disabled = (sent(always, MESSAGES, thinking={"type": kind})["content"]
                             for kind in ("enabled", "disabled"))
    assert [block["type"] for block in disabled] == ["text"] and len(enabled) == 2


@pytest.mark.parametrize("fields", [
    {"thinking_token_budget": -2}, {"thinking_token_budget": True}, {"thinking_token_budget": "3"},
    {"thinking_token_budget": 2**63}, {"thinking_token_budget": 3, "allowed_token_ids": [5]}])
def test_a_budget_out_of_range_is_refused(live: Live, fields: dict[str, Any]) -> None:
    answer = live.client.post(CHAT, json={"messages": [{"role": "user", "content": "x"}], **fields})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "thinking_token_budget"


def test_the_log_has_the_budget_and_replays(live: Live, log: Path) -> None:
    begin, end = tags(live)
    asked(live, thinking_token_budget=17)
    given_up = time.monotonic() + 120
    while True:  # the log is written beside the answers
        entries = list(log_file.read_file(log / "events"))
        budgets = [entry.spec.params.thinking for entry in entries if isinstance(entry, event_log.RequestEntry)]
        if ThinkingBudget(17, end, begin) in budgets or time.monotonic() > given_up:
            break
        time.sleep(0.05)
    assert ThinkingBudget(17, end, begin) in budgets
    found = replay(entries)
    assert found.difference is None and found.requests == len(budgets)
