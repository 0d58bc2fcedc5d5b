"""Whatever is sent, the answer is OpenAI's error with the field named, and everybody else goes on."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.live_server import JSON, Server, counted, running

from slotwise.api.app import ROUTES
from slotwise.text.tokenizer import Tokenizer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
SENTENCE = "This model's maximum context length is 512 tokens"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


@pytest.fixture(scope="module", autouse=True)
def canary(server: Server, tokenizer: Tokenizer) -> Iterator[None]:
    """Streams that run while everything below is sent; each must come out whole."""
    stop, texts = threading.Event(), []

    def sing() -> None:
        while not stop.is_set():
            events = server.events(COMPLETIONS, {"prompt": [40], "max_tokens": 200})
            texts.append("".join(event["choices"][0]["text"] for event in events))

    thread = threading.Thread(target=sing)
    thread.start()
    yield
    stop.set()
    thread.join()
    assert texts and set(texts) == {tokenizer.decode(counted(40, 200))}


def refused(response: httpx.Response, status: int, param: str | None) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json" and response.headers["x-request-id"]
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param, error
    assert error["message"] and isinstance(error["message"], str)
    return error


COMMON: list[tuple[str, Any]] = [
    ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", 10**6), ("max_tokens", 10**30), ("max_tokens", "5"),
    ("max_tokens", 1.5), ("max_tokens", True), ("max_tokens", []), ("temperature", -0.1), ("temperature", 1e9),
    ("temperature", "hot"), ("temperature", 10**400), ("top_p", 1e-31), ("top_p", 1.1), ("top_p", -1), ("top_k", -2),
    ("top_k", 2**63), ("top_k", 0.5), ("min_p", 2), ("min_p", -1), ("min_tokens", -1), ("min_tokens", 10**5),
    ("n", 0), ("n", -3), ("n", 129), ("n", 10**20), ("seed", 2**63), ("seed", "x"), ("presence_penalty", 3),
    ("frequency_penalty", -3), ("repetition_penalty", 0), ("stop", ""), ("stop", [""]), ("stop", 7),
    ("stop", ["x"] * 65), ("stop", "x" * 1025), ("stop", [["a"]]), ("stop_token_ids", [-1]), ("stop_token_ids", [400]),
    ("stop_token_ids", [2**80]), ("stop_token_ids", ["a"]), ("stop_token_ids", [3] * 257), ("ignore_eos", "yes"),
    ("logit_bias", {"400": 1}), ("logit_bias", {"a": 1}), ("logit_bias", {"4": 101}), ("logit_bias", {"-1": 1}),
    ("logit_bias", [1]), ("stream", "true"), ("stream", 1), ("stream_options", {"include_usage": True}),
    ("stream_options", 3), ("priority", "high"), ("priority", 2**70), ("request_id", ""), ("request_id", "a\r\nb: c"),
    ("request_id", "x" * 129), ("request_id", 3), ("response_format", {"type": "xml"}),
    ("response_format", {"type": "json_schema"}), ("guided_json", "{"), ("guided_json", {"uniqueItems": True}),
    ("guided_choice", []), ("guided_grammar", "start: x"), ("structured_outputs", {"regex": "a(b"}),
    ("structured_outputs", {"regx": "a"}), ("structured_outputs", {"regex": "a", "choice": ["b"]}),
    ("structured_outputs", {"regex": "a", "disable_additional_properties": True}), ("use_beam_search", True),
    ("bad_words", "x"), ("bad_words", [""]), ("bad_words", ["x"] * 65), ("allowed_token_ids", []),
    ("allowed_token_ids", [400]), ("allowed_token_ids", [2] * 5000), ("include_stop_str_in_output", 1),
    ("skip_special_tokens", "no"), ("truncate_prompt_tokens", 0), ("truncate_prompt_tokens", -2),
    ("truncate_prompt_tokens", 513), ("truncation_side", "top"), ("truncation_side", "x" * 9000), ("model", 5),
    ("model", ["toy"]), ("best_of", 2), ("stream_interval", 0), ("prompt_embeds", "x"), ("detokenize", False),
    ("service_tier", "gold"), ("service_tier", ""),
]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(("param", "value"), COMMON, ids=lambda value: str(value)[:20])
def test_a_bad_value_is_named(server: Server, path: str, param: str, value: Any) -> None:
    body = {"prompt": [2]} if path == COMPLETIONS else {"messages": HELLO}
    refused(server.post(path, body | {param: value}), 400, param)


@pytest.mark.parametrize("prompt", [
    None, 5, {}, [], "", [[]], [""], [2, "x"], ["x", 2], [[2], 5], [[2], ["x"]], [-1], [400], [2**70],
    [1.5], [None], [[2, 400]], [2] * 512, [2] * 100_000, "x" * 100_000, "the fox " * 2000, [[2]] * 1025, [[[2]]],
], ids=lambda value: str(value)[:16])
def test_a_bad_prompt(server: Server, prompt: Any) -> None:
    refused(server.post(COMPLETIONS, {"prompt": prompt}), 400, "prompt")


@pytest.mark.parametrize("messages", [
    None, 5, {}, [], "hello", [5], [{}], [{"role": 5, "content": "x"}], [{"content": "x"}],
    [{"role": "user", "content": 5}], [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": ""}}]}],
    [{"role": "user", "content": ["x"]}], [{"role": "user", "content": "x" * 100_000}], HELLO * 4097,
], ids=lambda value: str(value)[:24])
def test_bad_messages(server: Server, messages: Any) -> None:
    refused(server.post(CHAT, {"messages": messages}), 400, "messages")


@pytest.mark.parametrize(("kind", "holds"), [
    ("image_url", "images"), ("input_audio", "audio"), ("video_url", "video"), ("file", "files")])
def test_other_media_than_text_are_named(server: Server, kind: str, holds: str) -> None:
    part = {"type": kind, kind: {"url": "data:,"}}
    error = refused(server.post(CHAT, {"messages": [{"role": "user", "content": [part]}]}), 400, "messages")
    assert f"messages[0].content: the model takes text only; a part of type {kind} holds {holds}" == error["message"]
    assert error["code"] == "unsupported_content"


def test_an_answer_in_audio_is_no_message(server: Server) -> None:
    answer = {"role": "assistant", "content": None, "audio": {"id": "audio_1"}}
    error = refused(server.post(CHAT, {"messages": [*HELLO, answer, *HELLO]}), 400, "messages")
    assert error["message"] == "messages[1].audio: the model takes text only"


def test_a_message_repeats_little_of_a_long_value(server: Server) -> None:
    for body in ({"truncation_side": "x" * 50_000}, {"truncation_side": {"x" * 50_000: 1}}):
        assert len(refused(server.post(COMPLETIONS, {"prompt": [2]} | body), 400, "truncation_side")["message"]) < 600


@pytest.mark.parametrize(("param", "value"), [
    ("tools", [TOOL]), ("functions", [{}]), ("audio", {"voice": "x"}), ("modalities", ["audio"]),
    ("chat_template", "x"), ("chat_template", ""), ("top_logprobs", 2), ("logprobs", 3), ("documents", {}),
    ("reasoning_effort", "huge"), ("return_prompt_text", 1), ("chat_template_kwargs", {"documents": []}),
    ("tool_choice", "required"), ("chat_template_kwargs", {"messages": []}), ("chat_template_kwargs", 3),
    ("max_completion_tokens", "x"), ("web_search_options", {"a": 1})], ids=lambda value: str(value)[:20])
def test_what_chat_cannot_do(server: Server, param: str, value: Any) -> None:
    refused(server.post(CHAT, {"messages": HELLO, param: value}), 400, param)


@pytest.mark.parametrize(("param", "value"), [
    ("suffix", "x"), ("echo", 1), ("logprobs", 21), ("logprobs", -1), ("logprobs", True)])
def test_what_completions_cannot_do(server: Server, param: str, value: Any) -> None:
    refused(server.post(COMPLETIONS, {"prompt": [2], param: value}), 400, param)


def test_neutral_values_of_unsupported_fields_pass(server: Server) -> None:
    body = {"prompt": [2], "suffix": None, "echo": False, "best_of": 1, "response_format": {"type": "text"},
            "stop": None, "logit_bias": {}, "skip_special_tokens": True, "user": "me"}
    assert server.post(COMPLETIONS, body).status_code == 200


@pytest.mark.parametrize("body", [
    b"", b"{", b"[]", b"null", b"5", b'"x"', b'{"prompt": [2],}', b'{"prompt": [2], "temperature": NaN}',
    b'{"prompt": [2], "temperature": Infinity}', b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}', b"\x00\x01",
    b'{"x": ' + b"[" * 100_000, b'{"prompt": [2]} {}', b'{"prompt": [' + b"9" * 5000 + b"]}"],
    ids=lambda body: repr(body)[:24])
def test_malformed_bodies(server: Server, body: bytes) -> None:
    for path in (COMPLETIONS, CHAT, "/tokenize", "/detokenize"):
        response = server.post(path, body)
        assert response.status_code == 400 and response.json()["error"]["message"], response.text


def test_a_prompt_too_long_is_told_the_numbers(server: Server) -> None:
    """In OpenAI's sentences, word for word: programs look for them, and read the numbers in them."""
    def message(body: dict[str, Any], param: str, path: str = COMPLETIONS) -> str:
        error = refused(server.post(path, body), 400, param)
        assert error["code"] == "context_length_exceeded" and error["type"] == "invalid_request_error"
        assert error["message"].startswith(SENTENCE)
        return str(error["message"]).removeprefix(SENTENCE)

    end = " for the completion). Please reduce your prompt; or completion length."
    assert message({"prompt": [2] * 600}, "prompt") == f", however you requested 600 tokens (600 in your prompt; 0{end}"
    assert message({"prompt": [2] * 500, "max_tokens": 13}, "max_tokens") == (
        f", however you requested 513 tokens (500 in your prompt; 13{end}")
    assert message({"prompt": [2] * 512}, "prompt") == f", however you requested 513 tokens (512 in your prompt; 1{end}"
    for body in ({"prompt": "x" * 100_000}, {"prompt": "the fox " * 2000}, {"prompt": [[2], [2] * 512]}):
        assert re.match(r", however you requested (\d+) tokens \(\d+ in your prompt; \d+ for", message(body, "prompt"))
    for path, length in ((CHAT, 500), ("/tokenize", 500), (CHAT, 2000)):
        long = {"messages": [{"role": "user", "content": "the fox " * length}]}
        matched = re.fullmatch if length == 500 else re.match  # after it: how the tokens of a long text are counted
        assert matched(r"\. However, your messages resulted in (\d+) tokens\. Please reduce the length of the "
                       r"messages\. Input tokens exceed the configured limit of 512 tokens\.",
                       message(long, "messages", path))
    number = server.post("/tokenize", {"messages": HELLO}).json()["count"]
    for param in ("max_tokens", "max_completion_tokens"):
        assert message({"messages": HELLO, param: 4000}, param, CHAT) == (
            f". However, you requested {number + 4000} tokens ({number} in the messages, 4000 in the completion). "
            "Please reduce the length of the messages or completion.")
    assert server.post(COMPLETIONS, {"prompt": [2] * 500, "max_tokens": 12}).status_code == 200


def test_the_context_is_what_the_cache_holds(folder: Path, tmp_path: Path) -> None:
    """Clients shorten what they send by the same sentence, and the operator learns what to change."""
    with running(folder, tmp_path / "engine", "num_blocks=4") as small:
        places = 4 * 16
        chat = refused(small.post(CHAT, {"messages": [{"role": "user", "content": "the fox " * 100}]}), 400, "messages")
        assert chat["code"] == "context_length_exceeded"
        assert chat["message"].startswith(f"This model's maximum context length is {places + 1} tokens. However, your ")
        assert chat["message"].endswith(
            "The cache holds no more of the model's 512: start with a larger --kv-cache-memory.")
        asked = refused(small.post(COMPLETIONS, {"prompt": [2] * 40, "max_tokens": 40}), 400, "max_tokens")
        assert "however you requested 80 tokens (40 in your prompt; 40 for" in asked["message"]
        claude = small.post("/v1/messages", {"messages": HELLO, "max_tokens": 400}).json()["error"]["message"]
        assert re.match(rf"input length and `max_tokens` exceed context limit: \d+ \+ 400 > {places + 1}, ", claude)
        assert small.post(COMPLETIONS, {"prompt": [2] * places, "max_tokens": 1}).status_code == 200


def test_an_unknown_model(server: Server) -> None:
    for path, body in ((COMPLETIONS, {"prompt": [2]}), (CHAT, {"messages": HELLO}), ("/tokenize", {"prompt": "x"})):
        assert refused(server.post(path, body | {"model": "gpt"}), 404, "model")["code"] == "model_not_found"
    refused(server.get("/v1/models/gpt"), 404, "model")
    assert server.get("/v1/models/toy").json()["max_model_len"] == 512


@pytest.mark.parametrize(("path", "near"), [
    ("/chat/completions", CHAT), ("/v1/v1/chat/completions", CHAT), ("/api/chat", CHAT), ("/v1/chat/completion", CHAT),
    ("/completions", COMPLETIONS), ("/v1/completions/", COMPLETIONS), ("/api/generate", COMPLETIONS),
    ("/api/embed", "/v1/embeddings"), ("/models", "/v1/models"), ("/v1/message", "/v1/messages")])
def test_a_path_that_is_nearly_right_is_told_the_right_one(server: Server, path: str, near: str) -> None:
    error = refused(server.post(path, {}), 404, None)
    assert error["code"] == "not_found" and error["message"] == f"there is no such route; did you mean {near}?"


def test_unknown_paths_and_methods(server: Server) -> None:
    for path in ("/v1", "/v1/nothing", "/%00", "/v1/../elsewhere/x"):
        error = refused(server.get(path), 404, None)
        assert error["code"] == "not_found" and error["type"] == "not_found_error" and len(error["message"]) < 2100
        assert "POST /v1/chat/completions" in error["message"] and "GET /v1/models/{model}" in error["message"]
    has: dict[str, set[str]] = {}
    for method, path, _ in ROUTES:
        has.setdefault(path, set()).update({method, "HEAD"} if method == "GET" else {method})
    for path in sorted(has):
        methods = ", ".join(sorted(has[path]))
        response = server.client.patch(server.url + path)
        of_anthropics = path.startswith("/v1/messages")
        error = response.json()["error"] if of_anthropics else refused(response, 405, None)
        assert response.status_code == 405 and response.headers["allow"] == methods and methods in error["message"]


def test_too_large_a_body(server: Server) -> None:
    body = b'{"prompt": "' + b"x" * (17 << 20) + b'"}'
    assert refused(server.post(COMPLETIONS, body), 413, None)["code"] == "body_too_large"
    parts = (body[i : i + 65536] for i in range(0, len(body), 65536))  # its length is not announced
    refused(server.client.post(server.url + COMPLETIONS, content=parts, headers=JSON), 413, None)


def test_a_bad_request_id_header(server: Server) -> None:
    refused(server.post(COMPLETIONS, {"prompt": [2]}, **{"X-Request-Id": "x" * 129}), 400, "X-Request-Id")


def test_tokenize_and_detokenize(server: Server, tokenizer: Tokenizer) -> None:
    answer = server.post("/tokenize", {"prompt": "the fox", "return_token_strs": True}).json()
    assert answer["tokens"] == tokenizer.encode("the fox") and answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == 512 and len(answer["token_strs"]) == answer["count"]
    assert server.post("/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": "the fox"}
    long = "the quick brown fox " * 400
    assert server.post("/detokenize", {"tokens": tokenizer.encode(long)}).json() == {"prompt": long}
    refused(server.post("/tokenize", {}), 400, "prompt")
    refused(server.post("/tokenize", {"prompt": "x", "messages": HELLO}), 400, "prompt")
    refused(server.post("/tokenize", {"messages": []}), 400, "messages")
    for tokens in ([-1], [400], [2**70], "x", [[1]], None):
        refused(server.post("/detokenize", {"tokens": tokens}), 400, "tokens")


def test_what_is_not_http(server: Server) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    negative = b"POST /v1/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n"
    for garbage in (b"\x00" * 1000, b"GET / HTTP/9\r\n\r\n", negative):
        with socket.create_connection((host, int(port)), timeout=120) as connection:
            connection.sendall(garbage)
            assert b"400" in connection.recv(1000)
    assert server.get("/health").status_code == 200



@pytest.mark.parametrize("value", [0, -5, 2])
def test_best_of_out_of_range_is_named(server: Server, value: int) -> None:
    refused(server.post(COMPLETIONS, {"prompt": [2], "best_of": value}), 400, "best_of")


@pytest.mark.parametrize("tier", ["auto", "default", "flex", "priority", "scale", None])
def test_openais_tiers_are_accepted_where_there_are_none(server: Server, tier: str | None) -> None:
    assert server.post(COMPLETIONS, {"prompt": [2], "max_tokens": 1, "service_tier": tier}).status_code == 200


def test_null_is_the_default_of_a_generation_prompt(server: Server) -> None:
    body = {"messages": HELLO, "max_tokens": 1}
    lengths = [server.post(CHAT, body | more).json()["usage"]["prompt_tokens"] for more in (
        {}, {"add_generation_prompt": None}, {"add_generation_prompt": True})]
    assert len(set(lengths)) == 1
    counts = [server.post("/tokenize", {"messages": HELLO} | more).json()["count"]
              for more in ({}, {"add_generation_prompt": None})]
    assert counts[0] == counts[1]


def test_biases_of_many_choices_are_bounded(server: Server) -> None:
    body = {"prompt": [[2], [3]], "n": 128, "max_tokens": 1}
    answer = server.post(COMPLETIONS, body | {"logit_bias": {str(token): 1 for token in range(2, 302)}})
    refused(answer, 400, "logit_bias")
    assert "256 choices may have at most 256 tokens each" in answer.json()["error"]["message"]
