from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
from support.live_server import Server, counted

from slotwise.text.tokenizer import Tokenizer

HELLO = [{"role": "user", "content": "hello"}]


def prompt_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def chat(server: Server, **body: Any) -> dict[str, Any]:
    response = server.post("/v1/chat/completions", {"messages": HELLO, **body})
    assert response.status_code == 200, response.text
    return response.json()


def test_a_whole_answer(server: Server, tokenizer: Tokenizer) -> None:
    prompt = prompt_of(tokenizer, "<user>hello<assistant>")
    answer = chat(server, max_tokens=8)
    (choice,) = answer["choices"]
    assert choice["message"]["content"] == tokenizer.decode(counted(prompt[-1], 8))
    assert choice["message"]["role"] == "assistant" and choice["finish_reason"] == "length"
    assert answer["object"] == "chat.completion" and answer["id"].startswith("chatcmpl-")
    assert answer["usage"]["prompt_tokens"] == len(prompt)


def test_a_stream_opens_with_the_role_and_closes_with_the_reason(server: Server) -> None:
    events = server.events("/v1/chat/completions", {"messages": HELLO, "max_tokens": 20,
                                                    "stream_options": {"include_usage": True}})
    *events, usage = events
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert all(set(delta) == {"content"} for delta in deltas[1:])
    assert [event["choices"][0]["finish_reason"] for event in events] == [None] * (len(events) - 1) + ["length"]
    assert "".join(delta["content"] for delta in deltas) == chat(server, max_tokens=20)["choices"][0]["message"][
        "content"]
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 20
    assert {event["object"] for event in events} == {"chat.completion.chunk"}


def test_an_answer_may_fill_the_context(server: Server) -> None:
    answer = chat(server, ignore_eos=True)
    assert answer["usage"]["total_tokens"] == 512
    assert answer["choices"][0]["finish_reason"] == "length"
    assert chat(server, max_completion_tokens=5, max_tokens=9)["usage"]["completion_tokens"] == 5


def test_text_parts(server: Server) -> None:
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    joined = server.post("/tokenize", {"messages": [{"role": "user", "content": "hel\nlo"}]}).json()
    assert chat(server, messages=[{"role": "user", "content": parts}], max_tokens=1)["usage"]["prompt_tokens"] == (
        joined["count"])


def test_logprobs(server: Server, tokenizer: Tokenizer) -> None:
    choice = chat(server, max_tokens=2, logprobs=True, top_logprobs=2)["choices"][0]
    first, _ = counted(prompt_of(tokenizer, "<user>hello<assistant>")[-1], 2)
    entry = choice["logprobs"]["content"][0]
    assert bytes(entry["bytes"]) == tokenizer.token_bytes(first) and entry["logprob"] == -0.25
    assert [top["logprob"] for top in entry["top_logprobs"]] == [-0.25, -1.25]
    assert chat(server, max_tokens=2, logprobs=True)["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
    assert chat(server, max_tokens=2)["choices"][0]["logprobs"] is None


def test_choices_and_stop_strings(server: Server, tokenizer: Tokenizer) -> None:
    text = chat(server, max_tokens=20)["choices"][0]["message"]["content"]
    answer = chat(server, max_tokens=20, n=3, stop=[text[5:7]])
    assert [choice["message"]["content"] for choice in answer["choices"]] == [text[:5]] * 3
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"stop"}
    texts, roles = [""] * 3, 0
    for event in server.events("/v1/chat/completions", {"messages": HELLO, "max_tokens": 20, "n": 3}):
        choice = event["choices"][0]
        texts[choice["index"]] += choice["delta"]["content"]
        roles += "role" in choice["delta"]
    assert texts == [text] * 3 and roles == 3


def test_the_openai_client(server: Server, openai: ModuleType) -> None:
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none")
    answer = client.chat.completions.create(model="toy", messages=HELLO, max_tokens=12, logprobs=True, top_logprobs=3)
    stream = client.chat.completions.create(model="toy", messages=HELLO, max_tokens=12, stream=True)
    parts = [part.choices[0] for part in stream]
    assert "".join(part.delta.content or "" for part in parts) == answer.choices[0].message.content
    assert parts[0].delta.role == "assistant" and parts[-1].finish_reason == "length"
    assert len(answer.choices[0].logprobs.content) == 12
    assert [model.id for model in client.models.list()] == ["toy"]
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.chat.completions.create(model="other", messages=HELLO)


def test_a_template_may_refuse(server: Server) -> None:
    response = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "bad"}]})
    assert response.status_code == 400
    assert "not this" in response.json()["error"]["message"] and response.json()["error"]["param"] == "messages"


def test_a_role_that_is_not_known_is_refused_by_name(server: Server) -> None:
    """The toy's template would write any role."""
    for path in ("/v1/chat/completions", "/tokenize"):
        response = server.post(path, {"messages": [*HELLO, {"role": "narrator", "content": "x"}]})
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["message"].startswith("messages[1].role: must be ") and "'narrator'" in error["message"]
        assert error["param"] == "messages"


def test_a_developer_is_the_system_and_no_empty_field_reaches_the_template(server: Server) -> None:
    def written(*messages: dict[str, Any]) -> str:
        return str(chat(server, messages=list(messages), max_tokens=1, return_prompt_text=True)["prompt_text"])

    assert written({"role": "developer", "content": "brief"}, *HELLO) == "<system>brief<user>hello<assistant>"
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    result = {"role": "tool", "tool_call_id": "abcdefghi", "content": "ok", "name": None}
    expected = ('<user>hello<assistant><tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
                "<user><tool_response>\nok\n</tool_response><assistant>")
    for content in ({"content": None}, {}, {"content": ""}, {"content": []}):
        answer = {"role": "assistant", "tool_calls": [call], "refusal": None, **content}
        assert written(*HELLO, answer, result) == expected
    for fields in ({"tool_calls": None}, {"tool_calls": []}, {"function_call": None, "audio": None, "name": None}):
        assert written(*HELLO, {"role": "assistant", "content": "a", **fields}) == "<user>hello<assistant>a<assistant>"


def test_tools_that_must_not_be_called_are_no_hindrance(server: Server) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    assert chat(server, tools=[tool], tool_choice="none", max_tokens=1)["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize("more", [{}, {"logprobs": True}, {"return_token_ids": True}], ids=["plain", "logprobs", "ids"])
def test_the_role_is_the_first_event_of_a_stream(server: Server, more: dict[str, Any]) -> None:
    events = server.events("/v1/chat/completions", {"messages": HELLO, "max_tokens": 4} | more)
    roles = [choice["delta"].get("role") for event in events for choice in event["choices"]]
    assert roles[0] == "assistant" and not any(roles[1:])
