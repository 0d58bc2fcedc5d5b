"""`/tokenize` of messages gives the prompt that a chat with the same fields has."""

from __future__ import annotations

from typing import Any

import pytest
from support.live_server import Server

HEADER = "x-slotwise-warning"
MESSAGES = [{"role": "user", "content": "the fox"}, {"role": "assistant", "content": "runs"}]


def tokens_of(server: Server, **fields: Any) -> Any:
    return server.post("/tokenize", {"messages": MESSAGES} | fields)


@pytest.mark.parametrize("fields", [
    {}, {"add_generation_prompt": False}, {"continue_final_message": True},
    {"continue_final_message": True, "add_generation_prompt": False}, {"chat_template_kwargs": {"m": 1}}])
def test_the_tokens_are_those_of_the_chats_prompt(server: Server, fields: dict[str, Any]) -> None:
    chat = {"messages": MESSAGES, "max_tokens": 1, "return_token_ids": True} | fields
    prompt = server.post("/v1/chat/completions", chat).json()["prompt_token_ids"]
    assert tokens_of(server, **fields).json()["tokens"] == prompt


@pytest.mark.parametrize(("fields", "param"), [
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ({"chat_template": "x"}, "chat_template"), ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"), ({"tools": [{}]}, "tools")])
def test_what_a_chat_refuses_is_refused(server: Server, fields: dict[str, Any], param: str) -> None:
    answer = tokens_of(server, **fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("name", ["add_generation_prompt", "continue_final_message", "tools", "chat_template_kwargs"])
def test_a_text_has_no_fields_of_messages(server: Server, name: str) -> None:
    value: Any = [] if name == "tools" else {} if name == "chat_template_kwargs" else True
    answer = server.post("/tokenize", {"prompt": "the fox", name: value})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)


@pytest.mark.parametrize(("path", "body"), [
    ("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [2]}), ("/abort_requests", {"request_ids": ["x"]}),
    ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "x"}]})])
def test_unknown_fields_are_named(server: Server, path: str, body: dict[str, Any]) -> None:
    assert HEADER not in server.post(path, body).headers
    told = server.post(path, body | {"foo": 1})
    assert told.status_code == 200 and told.headers[HEADER] == "unknown fields are ignored: 'foo'"
