"""`/v1/responses`, by OpenAI's own client and over plain HTTP, beside the same conversation as a chat."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
from support.live_server import JSON, Server, counted, eventually, running, unanswered

from slotwise.api.openai.responses import Items
from slotwise.api.openai.responses_protocol import ResponsesRequest, messages_of
from slotwise.api.parsers.base_parser import CallArguments, CallName, Content, Part, Reasoning
from slotwise.api.protocol.decoding import decode
from slotwise.text.tokenizer import Tokenizer

PATH = "/v1/responses"
BODY = {"input": "hello", "max_output_tokens": 8}
KEY = {"Authorization": "Bearer one"}


@pytest.fixture(scope="module")
def client(server: Server, openai: ModuleType) -> Any:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0)


def text_after(tokenizer: Tokenizer, prompt: str, count: int) -> str:
    return tokenizer.decode(counted(tokenizer.encode(prompt, add_special_tokens=False)[-1], count))


def events_of(server: Server, **body: Any) -> list[dict[str, Any]]:
    with server.client.stream("POST", server.url + PATH, json=BODY | body | {"stream": True}) as response:
        assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    found = [json.loads(line.removeprefix("data: ")) for line in lines[1::2]]
    assert [line.removeprefix("event: ") for line in lines[::2]] == [one["type"] for one in found]
    assert [one["sequence_number"] for one in found] == list(range(len(found)))
    return found


def test_a_whole_response(client: Any, tokenizer: Tokenizer) -> None:
    prompt = "<system>be short<user>hello<assistant>"
    response = client.responses.create(model="toy", input="hello", instructions="be short", max_output_tokens=8)
    assert response.object == "response" and response.id.startswith("resp-")
    assert response.status == "incomplete" and response.incomplete_details.reason == "max_output_tokens"
    (item,) = response.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "incomplete")
    assert response.output_text == text_after(tokenizer, prompt, 8)
    usage = response.usage
    assert usage.input_tokens == len(tokenizer.encode(prompt, add_special_tokens=False))
    assert (usage.output_tokens, usage.total_tokens) == (8, usage.input_tokens + 8)
    assert usage.output_tokens_details.reasoning_tokens == 0
    ended = client.responses.create(model="toy", input="hello")
    assert ended.status == "completed" and ended.incomplete_details is None and ended.error is None


def test_a_stream_has_openais_events_in_order(client: Any, server: Server) -> None:
    whole = client.responses.create(model="toy", input="hello", max_output_tokens=20)
    with client.responses.stream(model="toy", input="hello", max_output_tokens=20) as stream:
        texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
    assert "".join(texts) == whole.output_text
    found = events_of(server, max_output_tokens=20)
    names = [one["type"].removeprefix("response.") for one in found]
    assert names[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert names[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert set(names[4:-4]) == {"output_text.delta"}
    assert found[0]["response"]["status"] == "in_progress" and found[0]["response"]["output"] == []
    last = found[-1]["response"]
    assert last["output"][0]["content"][0]["text"] == whole.output_text
    assert last["usage"]["output_tokens"] == 20
    finished = list(client.responses.create(model="toy", input="hello", stream=True))
    assert finished[-1].type == "response.completed"


@pytest.mark.parametrize(("changes", "named"), [
    ({"tools": [{"type": "function", "name": "f", "parameters": {}, "output_schema": {}}]}, "tools[0].output_schema"),
    ({"tools": [{"type": "function", "name": "f", "parameters": {}, "defer_loading": True}]}, "tools[0].defer_loading"),
    ({"text": {"format": {"type": "json_schema", "name": "n", "schema": {}, "title": "t"}}}, "json_schema.title"),
    ({"text": {"format": {"type": "text", "schema": {}}}}, "schema is not supported"),
    ({"include": ["message.output_text.logprobs"]}, "include"), ({"context_management": [{"type": "compaction"}]},
                                                                 "context_management")])
def test_a_key_that_would_be_ignored_is_named(server: Server, changes: dict[str, Any], named: str) -> None:
    answer = server.post(PATH, BODY | changes)
    assert answer.status_code == 400 and named in answer.json()["error"]["message"], answer.text


def test_values_that_change_nothing_pass(server: Server) -> None:
    tool = {"type": "function", "name": "f", "parameters": {}, "strict": None, "defer_loading": False, "async": False}
    answer = server.post(PATH, BODY | {
        "include": ["reasoning.encrypted_content", "web_search_call.action.sources"], "max_tool_calls": 3,
        "context_management": [], "top_logprobs": 0, "truncation": "disabled", "background": False,
        "tools": [tool], "tool_choice": "none", "text": {"format": {"type": "text", "schema": None}}})
    assert answer.status_code == 200 and "x-slotwise-warning" not in answer.headers, answer.text


def test_an_input_that_is_too_long_is_told_as_openai_does(client: Any, server: Server, openai: ModuleType) -> None:
    """Whole with 400; in a stream by its last events, in which Codex looks for it."""
    sentences = ("Your input exceeds the context window of this model. Please adjust your input and try again. "
                 "This model's maximum context length is 512 tokens. However, your messages resulted in ")
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError if not stream else openai.APIError) as caught:
            list(client.responses.create(model="toy", input="the fox " * 500, stream=stream))
        assert caught.value.message.removeprefix("Error code: 400 - ").find(sentences) >= 0
        assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")
    created, begun, error, failed = events_of(server, input="the fox " * 500, instructions="be short")
    assert (created["type"], begun["type"]) == ("response.created", "response.in_progress")
    assert error["type"] == "error" and error["error"]["code"] == "context_length_exceeded"
    response = failed["response"]
    assert failed["type"] == "response.failed" and response["status"] == "failed" and response["output"] == []
    assert response["error"]["code"] == "context_length_exceeded" and sentences in response["error"]["message"]
    assert response["id"] == created["response"]["id"] and response["instructions"] == "be short"
    number = client.responses.create(model="toy", input="hello", max_output_tokens=1).usage.input_tokens
    with pytest.raises(openai.BadRequestError, match=rf"\({number} in the messages, 600 in the completion\)") as caught:
        client.responses.create(model="toy", input="hello", max_output_tokens=600)
    assert caught.value.param == "max_output_tokens"


def test_a_response_is_continued_fetched_and_deleted(client: Any, server: Server, openai: ModuleType) -> None:
    first = client.responses.create(model="toy", input="hello", instructions="old", max_output_tokens=4)
    assert client.responses.retrieve(first.id).output_text == first.output_text
    second = client.responses.create(model="toy", input="again", previous_response_id=first.id, instructions="new",
                                     max_output_tokens=4)
    turns = [{"role": "system", "content": "new"}, {"role": "user", "content": "hello"},
             {"role": "assistant", "content": first.output_text}, {"role": "user", "content": "again"}]
    chat = client.chat.completions.create(model="toy", messages=turns, max_tokens=4)
    assert second.output_text == chat.choices[0].message.content
    assert second.usage.input_tokens == chat.usage.prompt_tokens and second.previous_response_id == first.id
    streamed = events_of(server, previous_response_id=second.id)[-1]["response"]
    third = client.responses.create(model="toy", input="more", previous_response_id=streamed["id"], max_output_tokens=1)
    assert third.usage.input_tokens > streamed["usage"]["input_tokens"] > second.usage.input_tokens
    with pytest.raises(openai.BadRequestError, match="stream is not supported"):
        client.responses.retrieve(first.id, stream=True)
    client.responses.delete(first.id)
    for lost in (lambda: client.responses.retrieve(first.id), lambda: client.responses.delete(first.id)):
        with pytest.raises(openai.NotFoundError):
            lost()
    with pytest.raises(openai.BadRequestError, match="no complete response"):
        client.responses.create(model="toy", input="x", previous_response_id=first.id)


def test_a_response_that_is_not_stored_is_gone(client: Any, openai: ModuleType) -> None:
    response = client.responses.create(model="toy", input="hello", max_output_tokens=2, store=False)
    assert response.store is False
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)


@pytest.mark.parametrize(("changes", "param"), [
    ({"input": []}, "input"), ({"input": None}, "input"), ({"input": [{"role": "robot", "content": "x"}]}, "input"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
    ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]}, "input"),
    ({"input": [{"role": "user"}]}, "input"), ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
    ({"input": [{"type": "function_call", "name": "f"}]}, "input"),
    ({"input": [{"type": "function_call_output", "output": "f"}]}, "input"),
    ({"max_output_tokens": 0}, "max_output_tokens"), ({"max_output_tokens": 4096}, "max_output_tokens"),
    ({"input": "x" * 9000}, "input"), ({"background": True}, "background"), ({"conversation": "c"}, "conversation"),
    ({"truncation": "auto"}, "truncation"), ({"include": ["message.output_text.logprobs"]}, "include"),
    ({"top_logprobs": 2}, "top_logprobs"), ({"max_tool_calls": 0}, "max_tool_calls"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"reasoning": {"summary": "detailed"}}, "reasoning"), ({"reasoning": {"effort": "a lot"}}, "reasoning"),
    ({"text": {"verbosity": "high"}}, "text"), ({"stream_options": {"include_obfuscation": True}}, "stream_options"),
    ({"metadata": {"a": 1}}, "metadata"), ({"tools": [{"type": "web_search"}]}, "tools"),
    ({"tool_choice": {"type": "file_search"}}, "tool_choice"), ({"previous_response_id": "x"}, "previous_response_id"),
    ({"temperature": 101}, "temperature")])
def test_what_is_wrong_is_named(server: Server, changes: dict[str, Any], param: str) -> None:
    response = server.post(PATH, BODY | changes)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param, response.text


def test_fields_that_change_nothing_are_accepted(server: Server) -> None:
    response = server.post(PATH, BODY | {
        "background": False, "truncation": "disabled", "include": ["reasoning.encrypted_content"], "top_logprobs": 0,
        "reasoning": {"summary": "auto"}, "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "metadata": {"a": "b"}, "prompt_cache_key": "k", "parallel_tool_calls": True, "store": True})
    assert response.status_code == 200, response.text
    assert "x-slotwise-warning" not in response.headers and response.json()["metadata"] == {"a": "b"}
    assert server.post(PATH, BODY | {"model": "other"}).status_code == 404


@pytest.fixture(scope="module")
def slow(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tenth of a second a step, one slot, two keys."""
    log = tmp_path_factory.mktemp("slow") / "engine"
    with running(folder, log, "seconds_per_step=0.1", "max_num_seqs=1", "api_keys=one,two") as started:
        yield started


def test_keys_share_no_responses(slow: Server) -> None:
    assert slow.post(PATH, BODY).status_code == 401
    name = slow.post(PATH, BODY, **KEY).json()["id"]
    other = {"Authorization": "Bearer two"}
    assert slow.get(f"{PATH}/{name}", **KEY).status_code == 200
    assert slow.get(f"{PATH}/{name}", **other).status_code == 404
    assert slow.client.delete(f"{slow.url}{PATH}/{name}", headers=other).status_code == 404
    assert slow.post(PATH, BODY | {"previous_response_id": name}, **other).status_code == 400
    assert slow.post(PATH, BODY | {"previous_response_id": name}, **KEY).status_code == 200


def test_a_client_that_leaves_frees_its_slot_and_leaves_no_response(slow: Server) -> None:
    with unanswered(slow, PATH, {"input": "hello", "request_id": "left"}, **KEY):
        eventually(lambda: slow.get("/requests/left", **KEY).status_code == 200)
        eventually(lambda: slow.get(f"{PATH}/resp-left", **KEY).json().get("status") == "in_progress")
        early = slow.post(PATH, BODY | {"previous_response_id": "resp-left"}, **KEY)
        assert early.status_code == 400
    eventually(lambda: "finish resp-left-" in slow.engine_log.read_text())
    eventually(lambda: slow.get(f"{PATH}/resp-left", **KEY).status_code == 404)


def test_an_abort_fails_a_stream_and_a_deadline_is_504(slow: Server) -> None:
    ends: list[str] = []

    def ask() -> None:
        with httpx.stream("POST", slow.url + PATH, headers=JSON | KEY, timeout=60, json={
                "input": "hello", "request_id": "abort-me", "stream": True}) as response:
            for line in response.iter_lines():
                ends.append(line)

    asking = threading.Thread(target=ask)
    asking.start()
    eventually(lambda: any("output_text.delta" in line for line in ends))
    late = slow.post(PATH, BODY | {"queue_timeout": 0.01}, **KEY)
    assert late.status_code == 504 and late.json()["error"]["code"] == "timeout"
    assert slow.post("/abort_requests", {"request_id": "abort-me"}, **KEY).json()["aborted"] == ["abort-me"]
    asking.join()
    last = json.loads([line for line in ends if line][-1].removeprefix("data: "))
    assert last["type"] == "response.failed" and last["response"]["status"] == "failed"
    assert last["response"]["error"] == {"code": "server_error", "message": "the request was aborted"}
    assert slow.get(f"{PATH}/resp-abort-me", **KEY).status_code == 404


def test_items_become_a_chat() -> None:
    items = [
        {"role": "developer", "content": "be short"}, {"role": "user", "content": [
            {"type": "input_text", "text": "weather?"}]},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "call it"}]},
        {"type": "reasoning", "id": "s", "summary": [{"type": "summary_text", "text": "now"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "one moment"}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Rome"}'},
        {"type": "function_call", "call_id": "c2", "name": "time", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "noon"}]},
        {"type": "message", "role": "assistant", "content": "Sunny."}]
    called = [{"id": f"c{place}", "type": "function", "function": {"name": name, "arguments": arguments}}
              for place, name, arguments in ((1, "weather", '{"city": "Rome"}'), (2, "time", "{}"))]
    assert messages_of(items) == [
        {"role": "developer", "content": "be short"}, {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": "one moment", "reasoning_content": "call it\nnow", "tool_calls": called},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        {"role": "tool", "tool_call_id": "c2", "content": "noon"}, {"role": "assistant", "content": "Sunny."}]


def test_fields_of_a_chat() -> None:
    schema = {"type": "object", "properties": {}}
    body = BODY | {
        "tools": [{"type": "function", "name": "f", "description": "d", "parameters": schema, "strict": None}],
        "tool_choice": {"type": "function", "name": "f"}, "parallel_tool_calls": False, "user": "u",
        "text": {"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}},
        "reasoning": {"effort": "low"}}
    chat = decode(ResponsesRequest, json.dumps(body).encode()).as_chat([])
    assert chat.tools == [{"type": "function", "function": {"name": "f", "description": "d", "parameters": schema}}]
    assert chat.tool_choice == {"type": "function", "function": {"name": "f"}}
    assert chat.response_format == {"type": "json_schema", "json_schema": {
        "name": "n", "schema": schema, "strict": True}}
    assert (chat.reasoning_effort, chat.parallel_tool_calls, chat.user, chat.max_tokens) == ("low", False, "u", 8)


PARTS: list[Part] = [
    Reasoning("let me "), Reasoning("see"), Content("I "), Content("call"), CallName(0, "f"),
    CallArguments(0, '{"a":'), CallArguments(0, "1}"), CallName(1, "g"), Content("done")]


def test_deltas_build_the_items() -> None:
    items, texts, done, opened = Items("x"), dict[int, str](), dict[int, Any](), list[str]()
    for kind, fields in [*[event for part in PARTS for event in items.read([part])], *items.end()]:
        if kind == "output_item.added":
            assert fields["output_index"] == len(texts) == len(done)
            texts[fields["output_index"]] = ""
            opened.append(fields["item"]["id"])
        elif kind.endswith(".delta"):
            assert fields["item_id"] == opened[-1] and fields["output_index"] == len(texts) - 1
            texts[fields["output_index"]] += fields["delta"]
        elif kind == "output_item.done":
            done[fields["output_index"]] = json.loads(json.dumps(fields["item"]))
    assert list(done.values()) == items.items
    assert [item["type"] for item in items.items] == [
        "reasoning", "message", "function_call", "function_call", "message"]
    assert list(texts.values()) == ["let me see", "I call", '{"a":1}', "", "done"]
    assert [item.get("arguments", "") or item.get("content", [{"text": ""}])[0]["text"] for item in items.items] == (
        list(texts.values()))
    assert len({item["id"] for item in items.items}) == 5
