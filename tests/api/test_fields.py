"""Every field of OpenAI's and vLLM's protocols is obeyed, accepted with what changes nothing, or refused by name."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.live_server import Server

from slotwise.api.anthropic.messages_protocol import MessagesRequest
from slotwise.api.http.http_exchange import HttpExchange
from slotwise.api.limits import bodies as module
from slotwise.api.limits.bodies import KEYS, unknown_fields, unknown_keys
from slotwise.api.openai.responses_protocol import ReasoningConfig, ResponsesRequest
from slotwise.api.pooling.decisions import DecisionRequest
from slotwise.api.pooling.embeddings import EmbeddingRequest
from slotwise.api.pooling.scoring import RerankRequest, ScoreRequest
from slotwise.api.protocol.decoding import LARGE, MAX_FIELD, decode
from slotwise.api.protocol.protocol import ChatRequest, CompletionRequest
from slotwise.api.protocol.unsupported import AS_ANOTHER, HINTS, NEUTRAL, unsupported_fields
from slotwise.errors import ThrottledWarning

sys.path.append(str(Path(__file__).resolve().parents[2]))  # `docs` is run from the repository's root

from docs.generate.protocols import NEUTRAL as NEUTRAL_FIELD
from docs.generate.protocols import OBEYED, REFUSED, names, paths_of, treatment

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BODIES: dict[str, tuple[type[msgspec.Struct], dict[str, Any]]] = {
    COMPLETIONS: (CompletionRequest, {"prompt": [2], "max_tokens": 2}),
    CHAT: (ChatRequest, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2})}
POOLED: dict[str, tuple[type[msgspec.Struct], dict[str, Any]]] = {
    "/v1/embeddings": (EmbeddingRequest, {"input": [2]}),
    "/v1/rerank": (RerankRequest, {"query": "a", "documents": ["b"]}),
    "/v1/score": (ScoreRequest, {"text_1": "a", "text_2": "b"}),
    "/v1/systemone": (DecisionRequest, {"state": "a", "questions": {"b": {"type": "noul"}}})}
REQUIRED = ("messages", "prompt", "input", "query", "documents", "text_1", "text_2", "state", "questions")
HEADER = "x-slotwise-warning"
SENT_HINTS = {"metadata": {"a": "b"}, "prompt_cache_key": "k", "safety_identifier": "s", "session_id": "i"}


def known(path: str) -> list[str]:
    return sorted({name for protocol in ("openai", "vllm") if path in paths_of(protocol)
                   for name in names(protocol, path)})


EACH = [(path, name) for path in (*BODIES, *POOLED) for name in known(path)]


def sent(server: Server, path: str, **fields: Any) -> Any:
    return server.post(path, (BODIES | POOLED)[path][1] | fields)


def test_the_lists_have_openais_own_parameters() -> None:
    from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming as ChatParams
    from openai.types.completion_create_params import CompletionCreateParamsNonStreaming as TextParams

    for path, kind in ((COMPLETIONS, TextParams), (CHAT, ChatParams)):
        parameters = kind.__required_keys__ | kind.__optional_keys__
        assert len(parameters) > 15 and parameters <= set(names("openai", path))


@pytest.mark.parametrize(("path", "name"), EACH)
def test_a_known_field_has_one_treatment(server: Server, path: str, name: str) -> None:
    kind = (BODIES | POOLED)[path][0]
    done = treatment(kind, name)
    if name not in REQUIRED:
        answer = sent(server, path, **{name: None})
        assert answer.status_code == 200 and HEADER not in answer.headers, answer.text
    wrong = sent(server, path, **{name: {"neither": ["this", "nor", "that"]}})
    if done == OBEYED:
        assert name not in unsupported_fields(kind) and f"'{name}'" not in wrong.headers.get(HEADER, "")
        return
    others = SENT_HINTS | dict.fromkeys(AS_ANOTHER, 1)
    for value in (others[name],) if name in others else unsupported_fields(kind)[name][1:]:
        answer = sent(server, path, **{name: value})
        assert done == NEUTRAL_FIELD and answer.status_code == 200 and HEADER not in answer.headers, answer.text
    if name != "metadata":
        error = wrong.json()["error"]
        assert wrong.status_code == 400 and error["param"] == name and name in error["message"], error


def test_the_values_that_change_nothing_are_of_fields_that_exist() -> None:
    kinds = [*(kind for kind, _ in (BODIES | POOLED).values()), ResponsesRequest, ReasoningConfig, MessagesRequest]
    fields = {name for kind in kinds for name in kind.__struct_fields__}
    assert set(NEUTRAL) | set(HINTS) <= fields and not set(NEUTRAL) & set(HINTS)
    assert treatment(CompletionRequest, "detokenize") == NEUTRAL_FIELD and treatment(ChatRequest, "audio") == REFUSED
    with pytest.raises(KeyError):
        treatment(ChatRequest, "prompt")


@pytest.mark.parametrize(("name", "value", "status"), [
    ("detokenize", 1, 400), ("watermarking", 0, 400), ("length_penalty", True, 400), ("length_penalty", 1, 200),
    ("use_beam_search", 0, 400), ("thinking_token_budget", -1, 200)])
def test_a_number_is_not_a_truth_value(server: Server, name: str, value: object, status: int) -> None:
    assert sent(server, COMPLETIONS, **{name: value}).status_code == status


@pytest.mark.parametrize("path", BODIES)
def test_an_unknown_field_is_answered_with_a_warning(server: Server, path: str) -> None:
    whole, told = sent(server, path), sent(server, path, temprature=0, top_q=[1])
    assert told.status_code == 200 and HEADER not in whole.headers
    assert told.json()["choices"] == whole.json()["choices"]
    assert told.headers[HEADER] == "unknown fields are ignored: 'temprature', 'top_q'"
    with server.client.stream("POST", server.url + path, json=BODIES[path][1] | {"stream": True, "x": 1}) as stream:
        assert stream.headers[HEADER] == "unknown fields are ignored: 'x'"


def test_an_unknown_field_of_an_inner_object_is_named_with_it(server: Server) -> None:
    options = {"include_usage": True, "include": 1}
    body = BODIES[COMPLETIONS][1] | {"stream": True, "x": 1, "stream_options": options}
    with server.client.stream("POST", server.url + COMPLETIONS, json=body) as stream:
        assert stream.headers[HEADER] == "unknown fields are ignored: 'x', 'stream_options.include'"
    large = {"stream_options": options, "prompt": "x" * LARGE, "x": 1}
    assert unknown_fields(CompletionRequest, json.dumps(large).encode()) == ["stream_options.include"]
    assert unknown_fields(CompletionRequest, b'{"prompt":"x","stream_options":null,"y":1}') == ["y"]


@pytest.mark.parametrize(("path", "fields"), [
    (CHAT, {"logprobs": False, "top_logprobs": 0}), (CHAT, {"top_logprobs": 0}), (CHAT, {"documents": []}),
    (COMPLETIONS, {"stream_options": {}}), (COMPLETIONS, {"stream": False, "stream_options": {"include_usage": False}}),
    (CHAT, {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True}), (CHAT, {"chat_template_kwargs": {}}),
    (CHAT, {"response_format": {"type": "text", "json_schema": None}}), (COMPLETIONS, {"kv_transfer_params": None}),
    (COMPLETIONS, {"top_p": 0}), (COMPLETIONS, {"bad_words": [], "stop": [], "logit_bias": {}, "suffix": ""})])
def test_values_that_change_nothing_pass(server: Server, path: str, fields: dict[str, Any]) -> None:
    plain, given = sent(server, path), sent(server, path, **fields)
    assert given.status_code == 200 and HEADER not in given.headers, given.text
    assert given.json()["choices"] == plain.json()["choices"]


SCHEMA = {"type": "object"}


@pytest.mark.parametrize(("path", "fields", "named"), [
    (COMPLETIONS, {"response_format": {"type": "text", "schema": SCHEMA}}, "response_format: schema is not supported"),
    (CHAT, {"response_format": {"type": "json_object", "json_schema": {"schema": SCHEMA}}}, "json_schema is not"),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}, "schema": {}}}, "schema is"),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA, "shcema": 1}}},
     "json_schema.shcema is not supported"),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "f"}}],
            "tool_choice": {"type": "function", "function": {"name": "f", "arguments": "{}"}}},
     "tool_choice.function.arguments is not supported"),
    (COMPLETIONS, {"response_format": {"type": "structural_tag", "triggers": ["<"], "at_least_one": True,
                                       "structures": [{"begin": "<", "end": ">"}]}}, "at_least_one is not supported"),
    (COMPLETIONS, {"structured_outputs": {"structural_tag": {"triggers": ["<"], "structures": [
        {"begin": "<", "end": ">", "max": 3}]}}}, "structures[0].max is not supported"),
    (CHAT, {"documents": [{"text": "a"}]}, "documents: the model's chat template leaves them out")])
def test_a_key_that_would_be_ignored_is_named(server: Server, path: str, fields: dict[str, Any], named: str) -> None:
    answer = sent(server, path, **fields)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] in fields and named in answer.json()["error"]["message"]


def test_a_variable_that_the_template_does_not_read_is_told(server: Server) -> None:
    given = {"chat_template_kwargs": {"enable_thinking": True, "colour": "red", "m": 1}}
    for path, messages in ((CHAT, BODIES[CHAT][1]), ("/tokenize", {"messages": BODIES[CHAT][1]["messages"]})):
        answer = server.post(path, messages | given)
        assert answer.headers[HEADER] == (
            "unknown fields are ignored: 'chat_template_kwargs.enable_thinking', 'chat_template_kwargs.colour', "
            "'chat_template_kwargs.m'")


def test_an_effort_that_the_template_does_not_read_is_told(server: Server) -> None:
    answer = sent(server, CHAT, reasoning_effort="low")
    assert answer.status_code == 200 and answer.headers[HEADER] == "unknown fields are ignored: 'reasoning_effort'"


def block(**more: Any) -> dict[str, Any]:
    return {"type": "text", "text": "x"} | more


CALL = {"id": "c", "type": "function", "index": 0, "function": {"name": "f", "arguments": "{}"}}
RESULT = {"type": "tool_result", "tool_use_id": "c", "content": [block(foo=1)], "bar": True}


@pytest.mark.parametrize(("path", "body", "named"), [
    (CHAT, {"messages": [{"role": "user", "content": "x"}, {"role": "user", "content": [block(), block(foo=1)]}]},
     "'messages[1].content[1].foo'"),
    (CHAT, {"messages": [{"role": "user", "content": "x", "nmae": "y"}]}, "'messages[0].nmae'"),
    ("/tokenize", {"messages": [{"role": "user", "content": "x", "nmae": "y"}]}, "'messages[0].nmae'"),
    ("/v1/messages", {"messages": [{"role": "user", "content": [RESULT]}], "system": [block(foo=1)]},
     "'messages[0].content[0].bar', 'messages[0].content[0].content[0].foo'"),
    ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "system": [block(foo=1)]}, "'system[0].foo'"),
    ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_text", "text": "x", "foo": 1}]}]},
     "'input[0].content[0].foo'"),
    ("/v1/responses", {"input": [{"role": "user", "content": "x", "foo": 1}]}, "'input[0].foo'")])
def test_an_unknown_key_of_a_message_is_named_with_its_path(
        server: Server, path: str, body: dict[str, Any], named: str) -> None:
    answer = server.post(path, {"model": "toy", "max_tokens" if "input" not in body else "max_output_tokens": 1} | body)
    assert answer.status_code == 200, answer.text
    assert f"unknown fields are ignored: {named}" in answer.headers[HEADER]


@pytest.mark.parametrize(("name", "values"), [
    ("messages", [{"role": "user", "content": [block(cache_control={"type": "ephemeral"}, citations=None, foo=None)]},
                  {"role": "assistant", "content": None, "refusal": None, "annotations": [], "audio": None,
                   "function_call": None, "tool_calls": [CALL], "parsed": {"a": 1}, "x": []}]),
    ("input", [{"type": "message", "id": "m", "status": "completed", "role": "assistant", "phase": "final_answer",
                "content": [block(annotations=[], logprobs=[], parsed=1)]},
               {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "e", "content": [block()]},
               {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}",
                "parsed_arguments": {"a": 1}}])])
def test_what_sdks_send_back_is_no_unknown_key(name: str, values: list[dict[str, Any]]) -> None:
    assert list(unknown_keys(name, values)) == []


def test_keys_that_sdks_answers_have_are_known() -> None:
    import anthropic.types as blocks
    from openai.types import chat, responses

    kinds = (chat.ChatCompletionMessage, responses.ResponseOutputMessage, responses.ResponseOutputText,
             responses.ResponseFunctionToolCall, responses.ResponseReasoningItem, blocks.TextBlock,
             blocks.ThinkingBlock, blocks.ToolUseBlock, blocks.Message)
    for kind in kinds:
        assert kind.model_fields.keys() <= KEYS, kind


@pytest.mark.parametrize(("query", "told"), [("?beta=true", None), ("?api-version=1", None), ("?foo=", "'?foo'")])
def test_an_unknown_parameter_of_a_query_is_told(server: Server, query: str, told: str | None) -> None:
    answer = server.post(CHAT + query, BODIES[CHAT][1])
    assert answer.status_code == 200
    assert answer.headers.get(HEADER) == (told and f"unknown fields are ignored: {told}")


def test_a_refusal_is_what_the_assistant_said(server: Server) -> None:
    def prompt(content: Any, **more: Any) -> Any:
        messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": content}, *more.get("then", ())]
        return sent(server, CHAT, messages=messages, return_prompt_text=True)

    part = {"type": "refusal", "refusal": "the fox"}
    for then in ([], [{"role": "user", "content": "hello"}]):  # the last message is left open, or not
        assert prompt([part], then=then).json()["prompt_text"] == prompt("the fox", then=then).json()["prompt_text"]
    both = [{"type": "text", "text": "the"}, part]
    assert "the\nthe fox" in prompt(both).json()["prompt_text"]
    answer = sent(server, CHAT, messages=[{"role": "user", "content": [part]}])
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "messages"


def test_obfuscated_events_are_refused(server: Server) -> None:
    for value, status in ((True, 400), (False, 200)):
        answer = sent(server, COMPLETIONS, stream=True, stream_options={"include_obfuscation": value})
        assert answer.status_code == status and HEADER not in answer.headers


@pytest.mark.parametrize("name", ["a\r\nset-cookie: b", "é\u2028🙂", "'", "\u0000", "x" * 100_000, ""])
def test_any_name_is_escaped_and_bounded(server: Server, name: str) -> None:
    told = sent(server, COMPLETIONS, **{name: 1})
    assert told.status_code == 200 and "set-cookie" not in told.headers
    assert told.headers[HEADER] == f"unknown fields are ignored: {name[:module.MAX_CHARACTERS]!a}"


def test_many_unknown_fields_are_few_in_the_header(server: Server) -> None:
    told = sent(server, COMPLETIONS, **{f"k{number}": 1 for number in range(5000)})
    assert told.headers[HEADER] == "unknown fields are ignored: " + ", ".join(f"'k{number}'" for number in range(5))
    assert len(sent(server, COMPLETIONS, **{"🙂" * 50 + str(i): 1 for i in range(9)}).headers[HEADER]) < 2500


def test_of_a_large_body_the_first_unknown_field_is_named() -> None:
    body = {"prompt": "x" * LARGE, "first": 1, "n": 1, "second": 2}
    assert unknown_fields(CompletionRequest, json.dumps(body).encode()) == ["first"]
    assert unknown_fields(CompletionRequest, b'{"prompt":"x","n":[{"deep":1}]}') == []


def test_a_warning_is_logged_once_a_minute(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(module, "_warning", ThrottledWarning(logging.getLogger("fields")))
    exchange = HttpExchange({"headers": [], "query_string": b""}, None, None, "x")  # type: ignore[arg-type]
    before = len(exchange.more)
    for number in range(50):
        module.warn_of_unknown_fields(exchange, CompletionRequest, b'{"prompt":"x","k%d":1}' % number)
    assert [record.message for record in caplog.records] == ["unknown fields are ignored: 'k0'"]
    assert len(exchange.more) == before + 50


WHOLE: list[tuple[str, str, object]] = [
    ("max_tokens", "16.0", 16), ("max_tokens", "1.6e1", 16), ("n", "2.0", 2), ("top_k", "-1.0", -1),
    ("seed", "-7.0", -7), ("logprobs", "0.0", 0), ("stop_token_ids", "[3.0, 4]", [3, 4]),
    ("prompt", "[2.0, 5.0]", [2, 5]), ("prompt", '["2.0", [3.0]]', ["2.0", [3]]), ("priority", "-2.0", -2),
    ("bench_output_tokens", "[3.0]", [3]), ("truncate_prompt_tokens", "-1.0", -1)]


@pytest.mark.parametrize(("name", "written", "meant"), WHOLE)
def test_an_integral_float_is_an_integer(server: Server, name: str, written: str, meant: object) -> None:
    fields = {key: json.dumps(value) for key, value in BODIES[COMPLETIONS][1].items()} | {name: written}
    body = "{" + ",".join(f'"{key}":{value}' for key, value in fields.items()) + "}"
    value = getattr(decode(CompletionRequest, body.encode()), name)
    assert value == meant and repr(value) == repr(meant)
    assert server.post(COMPLETIONS, body).status_code == 200


@pytest.mark.parametrize("value", ["16.5", "1e400", "-1.0", '"16.0"', "[16.0]", "1e308", "true"])
def test_any_other_is_refused_by_name(server: Server, value: str) -> None:
    for path, (_, body) in BODIES.items():
        answer = server.post(path, json.dumps(body)[:-1] + f',"max_tokens":{value}}}')
        assert answer.status_code == 400 and "max_tokens" in answer.json()["error"]["message"], answer.text


def test_variables_of_a_template_keep_their_floats() -> None:
    body = b'{"messages":[{"role":"user","content":"x"}],"max_tokens":2.0,"chat_template_kwargs":{"t":1.0}}'
    assert repr(decode(ChatRequest, body).chat_template_kwargs) == "{'t': 1.0}"


def test_integral_floats_of_a_long_prompt_are_refused(server: Server) -> None:
    """Rewriting them would take many times as long as decoding integers."""
    answer = server.post(COMPLETIONS, '{"prompt":[' + ",".join(["2.0"] * MAX_FIELD) + "]}")
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "prompt"
