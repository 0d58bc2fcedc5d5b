"""`/v1/messages`, by Anthropic's own client and over plain HTTP, beside the same conversation as a chat."""

from __future__ import annotations

import json
import re
import threading
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
from support.live_server import JSON, Server, counted, eventually, running, unanswered

from slotwise.api.anthropic.anthropic_messages import MessageBlocks, content
from slotwise.api.anthropic.messages_protocol import CountTokensRequest, MessagesRequest, messages_of
from slotwise.api.parsers.base_parser import CallArguments, CallName, Content, Part, Reasoning
from slotwise.api.protocol.decoding import decode
from slotwise.text.tokenizer import Tokenizer

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
HELLO = [{"role": "user", "content": "hello"}]
BODY = {"messages": HELLO, "max_tokens": 8}


@pytest.fixture(scope="module")
def client(server: Server, anthropic: ModuleType) -> Any:
    return anthropic.Anthropic(base_url=server.url, api_key="x", max_retries=0)


def text_after(tokenizer: Tokenizer, prompt: str, count: int) -> str:
    return tokenizer.decode(counted(tokenizer.encode(prompt, add_special_tokens=False)[-1], count))


def test_a_whole_message(client: Any, tokenizer: Tokenizer) -> None:
    prompt = "<system>be short<user>hello<assistant>"
    message = client.messages.create(model="toy", max_tokens=8, system="be short", messages=HELLO)
    assert message.type == "message" and message.role == "assistant" and message.id.startswith("msg-")
    (block,) = message.content
    assert block.type == "text" and block.text == text_after(tokenizer, prompt, 8)
    assert message.stop_reason == "max_tokens" and message.stop_sequence is None
    num_prompt = len(tokenizer.encode(prompt, add_special_tokens=False))
    usage = message.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == num_prompt and usage.output_tokens == 8
    counted_tokens = client.messages.count_tokens(model="toy", system="be short", messages=HELLO)
    assert counted_tokens.input_tokens == num_prompt


def test_a_stream_has_anthropics_events_in_order(client: Any, server: Server) -> None:
    whole = client.messages.create(model="toy", max_tokens=20, messages=HELLO)
    with client.messages.stream(model="toy", max_tokens=20, messages=HELLO) as stream:
        texts = list(stream.text_stream)
        final = stream.get_final_message()
    assert "".join(texts) == whole.content[0].text == final.content[0].text
    assert final.stop_reason == "max_tokens" and final.usage.output_tokens == 20
    assert final.usage.input_tokens + final.usage.cache_read_input_tokens == (
        whole.usage.input_tokens + whole.usage.cache_read_input_tokens)
    with server.client.stream("POST", server.url + PATH, json=BODY | {"stream": True}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    names = [line.removeprefix("event: ") for line in lines[::2]]
    events = [json.loads(line.removeprefix("data: ")) for line in lines[1::2]]
    assert [event["type"] for event in events] == names
    assert names[:3] == ["message_start", "ping", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(names[3:-3]) == {"content_block_delta"}
    assert events[0]["message"]["content"] == [] and events[0]["message"]["stop_reason"] is None


def test_a_stop_sequence_is_named(client: Any) -> None:
    text = client.messages.create(model="toy", max_tokens=20, messages=HELLO).content[0].text
    stop = text[5:8]
    message = client.messages.create(model="toy", max_tokens=20, messages=HELLO, stop_sequences=["never", stop])
    assert message.stop_reason == "stop_sequence" and message.stop_sequence == stop
    assert message.content[0].text == text[: text.index(stop)]


def test_a_turn_ends_with_the_models_end_token(server: Server) -> None:
    answer = server.post(PATH, {"messages": HELLO, "max_tokens": 400}).json()
    assert answer["stop_reason"] == "end_turn" and answer["stop_sequence"] is None


def test_a_last_message_of_the_assistant_is_continued(client: Any, tokenizer: Tokenizer) -> None:
    begun = [*HELLO, {"role": "assistant", "content": "the quick"}]
    message = client.messages.create(model="toy", max_tokens=4, messages=begun)
    assert message.content[0].text == text_after(tokenizer, "<user>hello<assistant>the quick", 4)


def test_text_blocks_are_one_text(client: Any, server: Server) -> None:
    blocks = [{"type": "text", "text": "hel", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "lo"}]
    found = client.messages.count_tokens(model="toy", messages=[{"role": "user", "content": blocks}])
    assert found.input_tokens == client.messages.count_tokens(
        model="toy", messages=[{"role": "user", "content": "hel\nlo"}]).input_tokens


@pytest.mark.parametrize(("changes", "named"), [
    ({"messages": []}, "messages"), ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "images"),
    ({"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}, "documents"),
    ({"messages": [{"role": "user", "content": [{"type": "search_result"}]}]}, "search_result"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "text"),
    ({"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}]},
     "redacted_thinking"),
    ({"messages": [{"role": "user", "content": [{"type": ["image"]}]}]}, "not supported"),
    ({"system": [{"type": {"image": 1}, "text": "a"}]}, "not supported"),
    ({"system": [{"type": "image"}]}, "system"), ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": None}, "max_tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": 9}}, "thinking: this model does not reason"),
    ({"max_tokens": 4096}, "exceed context limit"), ({"temperature": -1}, "temperature"),
    ({"stop_sequences": ["x" * 2000]}, "stop_sequences"), ({"container": "c"}, "container"),
    ({"mcp_servers": [{}]}, "mcp_servers"), ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
                                             "context_management"),
    ({"tools": [{"name": "f", "input_schema": {}, "input_examples": [{"a": 1}]}]}, "tools[0].input_examples"),
    ({"tools": [{"name": "f", "input_schema": {}, "defer_loading": True}]}, "tools[0].defer_loading"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {}, "strict": True}}},
     "output_config.format.strict"), ({"thinking": {"type": "often"}}, "thinking"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
    ({"tools": [{"name": "f"}]}, "input_schema"), ({"tool_choice": {"type": "tool"}}, "tool_choice"),
    ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"), ({"speed": "fast"}, "speed")])
def test_what_is_wrong_is_named_in_anthropics_form(server: Server, changes: dict[str, Any], named: str) -> None:
    response = server.post(PATH, BODY | changes)
    assert response.status_code == 400, response.text
    answer = response.json()
    assert answer["type"] == "error" and answer["error"]["type"] == "invalid_request_error"
    assert named in answer["error"]["message"]
    assert answer["request_id"] == response.headers["x-request-id"]


@pytest.mark.parametrize("fields", [
    {"context_management": {}}, {"context_management": {"edits": []}}, {"mcp_servers": []}, {"container": None},
    {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
    {"thinking": {"type": "disabled"}}, {"thinking": {"type": "disabled", "budget_tokens": 0}},
    {"thinking": {"type": "adaptive"}}, {"speed": "standard"}, {"stop_sequences": []}, {"system": []},
    {"tools": [], "tool_choice": {"type": "auto", "disable_parallel_tool_use": False}}, {"output_config": {}},
    {"tools": [{"type": "custom", "name": "f", "input_schema": {}, "cache_control": {"type": "ephemeral"},
                "eager_input_streaming": True, "defer_loading": False, "allowed_callers": ["direct"], "strict": None}],
     "tool_choice": {"type": "none"}}])
def test_what_changes_nothing_passes(server: Server, fields: dict[str, Any]) -> None:
    plain = server.post(PATH, BODY).json()["content"]
    for path in (PATH, COUNT):
        answer = server.post(path, BODY | fields)
        assert answer.status_code == 200, answer.text
        assert "x-slotwise-warning" not in answer.headers or path == COUNT
    assert server.post(PATH, BODY | fields).json()["content"] == plain


def test_thinking_is_the_templates(folder: Path, tmp_path: Path) -> None:
    """Where it reads one of the two names; a budget needs to know where the reasoning ends."""
    for name in ("enable_thinking", "thinking"):
        (checkpoint := tmp_path / name).mkdir()
        (checkpoint / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
        template = "{{ messages[0].content }}{{ 'ab' if NAME is not defined else 'cd' if NAME else 'ef' }}"
        (checkpoint / "tokenizer_config.json").write_text(json.dumps(
            {"chat_template": template.replace("NAME", name), "eos_token": "</s>"}))
        with running(checkpoint, tmp_path / f"{name}.log") as started:
            chat = {"messages": HELLO, "max_tokens": 1, "return_prompt_text": True}
            said = {}
            for kind in ("", "enabled", "adaptive", "disabled"):
                thinking = {"thinking": {"type": kind}} if kind else {}
                answer = started.post(PATH, BODY | thinking)
                assert answer.status_code == 200, answer.text
                said[kind] = answer.json()["content"]
            assert said["enabled"] == said["adaptive"] != said["disabled"] != said[""] != said["enabled"]
            assert started.post("/v1/chat/completions", chat | {"reasoning_effort": "high"}).json()[
                "prompt_text"] == "hellocd"
            budget = started.post(PATH, BODY | {"thinking": {"type": "enabled", "budget_tokens": 9}})
            assert "thinking.budget_tokens: where reasoning ends" in budget.json()["error"]["message"]
            none = started.post(PATH, BODY | {"thinking": {"type": "enabled", "budget_tokens": 0}})
            assert "thinking.budget_tokens: must be at least 1" in none.json()["error"]["message"]


def test_what_is_too_long_is_told_in_anthropics_sentences(client: Any, anthropic: ModuleType) -> None:
    """Claude Code asks for fewer tokens, or shortens the conversation, by the numbers in them."""
    number = client.messages.count_tokens(model="toy", messages=HELLO).input_tokens
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(model="toy", max_tokens=32_000, messages=HELLO, stream=True)
    assert re.findall(r"input length and `max_tokens` exceed context limit: (\d+) \+ (\d+) > (\d+)",
                      caught.value.message) == [(str(number), "32000", "512")]
    long = [{"role": "user", "content": "the fox " * 500}]
    for ask in (client.messages.count_tokens, partial(client.messages.create, max_tokens=4)):
        with pytest.raises(anthropic.BadRequestError) as caught:
            ask(model="toy", messages=long)
        [(found, most)] = re.findall(r"prompt is too long: (\d+) tokens > (\d+) maximum", caught.value.message)
        assert int(found) > int(most) == 512
    with pytest.raises(anthropic.BadRequestError) as caught:  # so long that it is not even tokenized
        client.messages.create(model="toy", max_tokens=4, messages=[{"role": "user", "content": "x" * 100_000}])
    [(found, most)] = re.findall(r"prompt is too long: (\d+) tokens > (\d+) maximum", caught.value.message)
    assert int(found) > int(most) == 512 and "at least" in caught.value.message


def test_other_errors_have_that_form_too(server: Server, client: Any, anthropic: ModuleType) -> None:
    with pytest.raises(anthropic.NotFoundError, match="model: the model 'other' does not exist"):
        client.messages.create(model="other", max_tokens=4, messages=HELLO)
    malformed = server.post(PATH, "{").json()["error"]
    assert (malformed["type"], malformed["code"]) == ("invalid_request_error", "malformed_json")
    assert server.post("/v1/messages/batches", {}).json()["error"]["type"] == "not_found_error"
    assert server.post("/v1/chat/completions", "{").json()["error"]["code"] == "malformed_json"


@pytest.fixture(scope="module")
def slow(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tenth of a second a step, one slot, two keys."""
    log = tmp_path_factory.mktemp("slow") / "engine"
    with running(folder, log, "seconds_per_step=0.1", "max_num_seqs=1", "api_keys=one,two") as started:
        yield started


def test_a_key_may_stand_in_either_header(slow: Server, anthropic: ModuleType) -> None:
    refused = slow.post(PATH, BODY)
    assert refused.status_code == 401 and refused.json()["error"]["type"] == "authentication_error"
    assert "x-api-key" in refused.json()["error"]["message"]  # by which Claude Code asks for another key
    assert slow.post(PATH, BODY, **{"x-api-key": "three"}).status_code == 401
    for options in ({"api_key": "one"}, {"auth_token": "two"}):
        client = anthropic.Anthropic(base_url=slow.url, max_retries=0, **options)
        assert client.messages.create(model="toy", max_tokens=2, messages=HELLO).usage.output_tokens == 2
    assert slow.get("/v1/models", **{"x-api-key": "one"}).status_code == 200


def test_a_client_that_leaves_frees_its_slot(slow: Server) -> None:
    with unanswered(slow, PATH, BODY | {"max_tokens": 400, "request_id": "left"}, **{"x-api-key": "one"}):
        eventually(lambda: slow.get("/requests/left", **{"x-api-key": "one"}).status_code == 200)
    eventually(lambda: "finish msg-left-" in slow.engine_log.read_text())
    eventually(lambda: slow.get("/health").json()["num_live"] == 0)


def test_a_deadline_and_an_abort_are_errors(slow: Server) -> None:
    key, ends = {"x-api-key": "one"}, list[tuple[int, str]]()

    def ask() -> None:
        with httpx.stream("POST", slow.url + PATH, headers=JSON | key, timeout=60, json=BODY | {
                "max_tokens": 400, "request_id": "abort-me", "stream": True}) as response:
            ends.append((response.status_code, response.read().decode()))

    asking = threading.Thread(target=ask)
    asking.start()
    eventually(lambda: "running" in slow.get("/requests/abort-me", **key).text)
    late = slow.post(PATH, BODY | {"queue_timeout": 0.01}, **key)
    assert late.status_code == 504 and late.json()["error"]["type"] == "timeout_error"
    assert slow.post("/abort_requests", {"request_id": "abort-me"}, **key).json()["aborted"] == ["abort-me"]
    asking.join()
    status, events = ends[0]
    assert status in (200, 400) and "the request was aborted" in events
    assert status == 400 or events.rstrip().rpartition("event: ")[2].startswith("error")


def test_turns_with_tools_become_a_chat() -> None:
    turns = [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "call it", "signature": "s"}, {"type": "text", "text": "one moment"},
            {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Rome"}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "sunny"}]},
            {"type": "tool_result", "tool_use_id": "c2", "content": "no", "is_error": True},
            {"type": "text", "text": "and tomorrow?"}]}]
    assert messages_of("be short", turns) == [
        {"role": "system", "content": "be short"}, {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": "one moment", "reasoning_content": "call it", "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Rome"}'}}]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        {"role": "tool", "tool_call_id": "c2", "content": "Error: no"}, {"role": "user", "content": "and tomorrow?"}]


def test_fields_of_a_chat() -> None:
    body = BODY | {
        "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True}, "stop_sequences": ["."],
        "metadata": {"user_id": "u"}, "service_tier": "standard_only", "top_k": 3}
    chat = decode(MessagesRequest, json.dumps(body).encode()).as_chat()
    assert chat.tools == [{"type": "function", "function": {
        "name": "f", "description": "d", "parameters": {"type": "object"}}}]
    assert (chat.tool_choice, chat.parallel_tool_calls, chat.stop) == ("required", False, ["."])
    assert (chat.user, chat.service_tier, chat.top_k, chat.max_tokens) == ("u", "default", 3, 8)
    named = body | {"tool_choice": {"type": "tool", "name": "f"}}
    assert decode(CountTokensRequest, json.dumps(named).encode()).as_chat().tool_choice == {
        "type": "function", "function": {"name": "f"}}


PARTS: list[Part] = [
    Reasoning("let me "), Reasoning("see"), Content("I "), Content("call"), CallName(0, "f"),
    CallArguments(0, '{"a":'), CallArguments(0, "1}"), CallName(1, "g"), CallName(2, "h"), CallArguments(2, "{oops")]


def test_events_build_what_a_whole_message_has() -> None:
    blocks, built = MessageBlocks(), dict[int, dict[str, Any]]()
    data = b"".join(event for part in PARTS for event in blocks.read([part])) + b"".join(blocks.close())
    open_index = None
    for line in data.decode().splitlines():
        if not line.startswith("data: "):
            continue
        event = json.loads(line.removeprefix("data: "))
        if event["type"] == "content_block_start":
            assert open_index is None
            open_index = event["index"]
            assert open_index == len(built)
            built[open_index] = event["content_block"] | {"partial": ""}
        elif event["type"] == "content_block_delta":
            assert event["index"] == open_index
            delta = event["delta"]
            field = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial"}[delta["type"]]
            built[open_index][field] += delta["partial_json" if field == "partial" else field]
        else:
            assert event["type"] == "content_block_stop" and event["index"] == open_index
            open_index = None
    whole = content(PARTS)
    assert [block["type"] for block in whole] == [block["type"] for block in built.values()] == [
        "thinking", "text", "tool_use", "tool_use", "tool_use"]
    assert whole[0]["thinking"] == built[0]["thinking"] == "let me see"
    assert whole[1]["text"] == built[1]["text"] == "I call"
    assert whole[2]["input"] == {"a": 1} and built[2]["partial"] == '{"a":1}'
    assert whole[3]["input"] == {} and built[3]["partial"] == ""
    assert whole[4]["input"] == {"INVALID_JSON": "{oops"}
