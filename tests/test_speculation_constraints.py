"""The table of failures, continued: drafts beside grammars, reasoning, tool calls and other tenants; a test a row.

Two servers run the same checkpoint, one of them without drafts.  The other looks up two tokens and the recent outputs.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import scripted
from support.live import Live, serving

from slotwise.core.record import StepRecord
from slotwise.observe import event_log, log_file

CALL = ('<tool_call>\n{"name": "book_a_table", "arguments": {"restaurant": "The Golden Lion", "persons": 2, '
        '"at": "half past seven"}}\n</tool_call>')
THOUGHT = "\nThe question is where Paris is, and perhaps what else there is to see in the country around it.\n"
SCRIPTS = {
    "#book": "I reserve it for you.\n" + CALL, "#reason": f"<think>{THOUGHT}</think>\n\nIt is in the north of France.",
    "#secret": "Account 9317, balance 20881, password hunter2 and the colour of the door is vermilion."}
TEMPLATE = scripted.TEMPLATE + "{% if enable_thinking is defined %}{{ '<think>' if enable_thinking }}{% endif %}"
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "book_a_table", "parameters": {
    "type": "object", "additionalProperties": False, "required": ["restaurant", "persons", "at"], "properties": {
        "restaurant": {"type": "string", "maxLength": 30}, "persons": {"type": "integer", "maximum": 9, "minimum": 1},
        "at": {"type": "string", "maxLength": 30}}}}}
ADDRESS = {"type": "json_schema", "json_schema": {"name": "address", "schema": {
    "type": "object", "additionalProperties": False, "required": ["street_and_number", "municipality"],
    "properties": {"street_and_number": {"enum": ["Long Lane 5", "Long Road 5"]},
                   "municipality": {"enum": ["Oxford", "Oxbridge"]}}}}}
LOOKUP_OF_TWO = json.dumps({
    "method": "suffix", "num_speculative_tokens": 6, "prompt_lookup_min": 2, "prompt_lookup_max": 2})

Verified = tuple[tuple[int, ...], tuple[int, ...]]

pytestmark = pytest.mark.slow


class Servers:
    """The server with drafts, its event log, and the same without drafts."""

    def __init__(self, drafting: Live, plain: Live, log: Path) -> None:
        self.drafting, self.plain, self._log = drafting, plain, log
        self._ids: set[str] = set()  # of the requests that `verified` tells about

    def sent(self, *said: str, **fields: Any) -> dict[str, Any]:
        answer = sent(self.drafting, *said, **fields)
        self._ids.add(answer["id"])
        return answer

    def same(self, *said: str, times: int = 6, **fields: Any) -> dict[str, Any]:
        """Asks both, and the one with drafts several times.  Returns the answer, which is always the same."""
        expected = choice_of(sent(self.plain, *said, **fields))
        for _ in range(times):
            assert choice_of(self.sent(*said, **fields)) == expected
        return expected

    def verified(self) -> list[Verified]:
        """Drafts and tokens of all rows with drafts of the requests since the last call."""
        ids, self._ids = self._ids, set()
        for _ in range(400):  # the log is written behind the responses
            entries = list(log_file.read_file(self._log))
            numbers = {entry.number for entry in entries if isinstance(entry, event_log.RequestEntry)
                       and any(entry.id.startswith(one) for one in ids)}
            steps = [entry for entry in entries if isinstance(entry, StepRecord)]
            if len(numbers) == len(ids) and numbers <= {end.request_id for step in steps for end in step.ended}:
                return [(drafts, tokens) for step in steps for number, drafts, tokens in zip(
                    step.plan.request_ids, step.plan.drafts, step.tokens, strict=False) if drafts and number in numbers]
            time.sleep(0.05)
        raise AssertionError("the log does not have these requests")


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    root = tmp_path_factory.mktemp("servers")
    folder = scripted.write(root / "scripted", SCRIPTS, TEMPLATE, ["<think>", "</think>"])
    options = (str(folder), "--served-model-name", "scripted", "--dtype", "float32", "--reasoning-parser", "qwen3",
               "--tool-call-parser", "hermes", "--enable-auto-tool-choice", "--max-model-len", "2048", "--api-key", "a",
               "--api-key", "b")
    log = root / "events"
    with (serving(*options, "--speculative-config", LOOKUP_OF_TWO, "--event-log", str(log), log=root / "1") as drafting,
          serving(*options, "--speculative-config", '{"method": "none"}', log=root / "2") as plain):
        yield Servers(drafting, plain, log)


def sent(live: Live, *said: str, key: str = "a", **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user" if at % 2 == 0 else "assistant", "content": text} for at, text in enumerate(said)]
    body = {"messages": messages, "temperature": 0, "max_tokens": 200, "return_token_ids": True, **fields}
    answer = live.client.post("/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {key}"})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def choice_of(answer: dict[str, Any]) -> dict[str, Any]:
    choice: dict[str, Any] = answer["choices"][0]
    for call in choice["message"].get("tool_calls") or ():
        call["id"] = ""
    return choice


def num_right(verified: list[Verified]) -> int:
    return sum(len(tokens) - 1 for _, tokens in verified)


def end_of_reasoning(live: Live) -> int:
    answer = live.client.post("/tokenize", json={"prompt": "</think>", "add_special_tokens": False},
                              headers={"Authorization": "Bearer a"})
    return int(answer.json()["tokens"][0])


def test_a_grammar(servers: Servers) -> None:
    """Drafts that the grammar does not allow are not accepted: those of free outputs, of the same beginning."""
    free = servers.same("Where do you live? #address", max_tokens=40)
    choice = servers.same("Where do you live? #address", response_format=ADDRESS)
    assert json.loads(choice["message"]["content"]).keys() == {"street_and_number", "municipality"}
    assert choice["token_ids"] != free["token_ids"] and num_right(servers.verified())


def test_a_seeded_output_under_a_grammar(servers: Servers) -> None:
    servers.verified()
    for seed in range(3):
        servers.same("Where? #address", response_format=ADDRESS, temperature=1.3, seed=seed, repetition_penalty=1.1)
    assert num_right(servers.verified())


def test_the_end_of_reasoning_inside_a_draft(servers: Servers) -> None:
    """Reasoning and answer are told apart by tokens, wherever a step ends (see `test_speculation.py`, too)."""
    servers.verified()
    message = servers.same("Where is Paris? #reason")["message"]
    assert message["reasoning_content"] == THOUGHT.strip() and message["content"] == "It is in the north of France."
    assert num_right(servers.verified())


def test_a_grammar_that_begins_at_the_end_of_reasoning_inside_a_draft(servers: Servers) -> None:
    """A draft may hold the end of the reasoning and what followed it without a grammar: the rest is not accepted."""
    for _ in range(4):
        servers.sent("Where is Paris? #reason")
    servers.verified()
    choice = servers.same("Where is Paris? #reason", structured_outputs={"choice": ["yes", "It is far"]})
    assert choice["message"]["content"] in ("yes", "It is far")
    assert choice["message"]["reasoning_content"] == THOUGHT.strip()
    end = end_of_reasoning(servers.drafting)
    assert num_right(servers.verified()) and end in choice["token_ids"]


@pytest.mark.parametrize("budget", [2, 5])
def test_a_budget_of_reasoning_that_is_used_up_inside_a_draft(servers: Servers, budget: int) -> None:
    """Earlier outputs reason on: of drafts from them those within the budget are accepted."""
    for _ in range(4):
        servers.sent("Where is Paris? #reason")
    servers.verified()
    choice = with_drafts(servers, lambda: servers.same("Where is Paris? #reason", thinking_token_budget=budget))
    assert choice["token_ids"].index(end_of_reasoning(servers.drafting)) == budget + 1


def with_drafts(servers: Servers, ask: Callable[[], dict[str, Any]], least: int = 1) -> dict[str, Any]:
    """The answer to a request of whose drafts at least so many were right: beside other work, steps may have none."""
    has_drafts = False
    for _ in range(20):
        answer = ask()
        verified = servers.verified()
        if num_right(verified) >= least:
            return answer
        has_drafts = has_drafts or bool(verified)
    assert not has_drafts, "its drafts are never right"
    pytest.skip("beside other work this engine has measured that drafts do not pay, and makes none")


def test_tool_calls_with_a_lookup_of_two(servers: Servers) -> None:
    """The conversation holds the same call, so that any two tokens of it are found there."""
    servers.verified()
    said = ("A table! #book", "I reserve it for you.\n" + CALL, "And another one! #book")
    choice = with_drafts(servers, lambda: servers.same(*said, tools=[TOOL]), 5)
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls" and json.loads(call["function"]["arguments"])["persons"] == 2


def test_a_required_call_with_a_lookup_of_two(servers: Servers) -> None:
    servers.verified()
    said = ("A table! #book", CALL, "And another one!")
    choice = with_drafts(servers, lambda: servers.same(
        *said, tools=[TOOL], tool_choice="required", parallel_tool_calls=False))
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "book_a_table"


def test_a_stop_string_across_drafts_of_a_call(servers: Servers) -> None:
    said = ("A table! #book", "I reserve it for you.\n" + CALL, "And another one! #book")
    choice = servers.same(*said, stop=["Golden Lion"])
    assert "The " in choice["message"]["content"] and "Golden" not in choice["message"]["content"]


@pytest.mark.parametrize("other", [
    {"key": "b"}, {"cache_salt": "b"}, {"key": "b", "cache_salt": "a"}, {"cache_salt": "a"}, {"cache_salt": ":"}])
def test_what_another_tenant_or_salt_received_is_never_drafted(servers: Servers, other: dict[str, Any]) -> None:
    """An attacker who knows all of the question, and all of the answer but its end, is told nothing by drafts.

    Its drafts are tokens of its own request; so neither counts nor times tell what follows elsewhere.
    """
    for _ in range(4):
        secret = choice_of(servers.sent("Tell me. #secret"))["token_ids"]
    servers.verified()
    answer = servers.sent("Tell me. #secret", **other)
    assert answer["choices"][0]["token_ids"] == secret
    known = {*answer["prompt_token_ids"], *secret[:1]}
    for drafts, tokens in servers.verified():
        assert known.issuperset(drafts), "of its own request"
        known.update(tokens)
    with_drafts(servers, lambda: servers.sent("Tell me. #secret"))  # the tenant itself has them
